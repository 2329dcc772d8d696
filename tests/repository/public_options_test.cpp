// The conventions of options, as the public headers state them: aggregates, in
// which every member that has a default may be left out, and timeouts that are
// optional.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/model_parallel.h>

#include <chrono>
#include <optional>
#include <type_traits>

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Timeout = std::optional<milliseconds>;

template <typename... Options>
constexpr bool kAggregates = (std::is_aggregate_v<Options> && ...);
template <typename... Options>
constexpr bool kDefaults = (std::is_default_constructible_v<Options> && ...);
template <typename... Options>
constexpr bool kAnyDefault = (std::is_default_constructible_v<Options> || ...);
template <typename... Options>
constexpr bool kOptionalTimeouts =
    (std::is_same_v<decltype(Options::timeout), Timeout> && ...);

TEST(PublicOptions, AreAggregatesWithDefaults) {
  EXPECT_TRUE(
      (kAggregates<AllToAllSingleOptions, AveragedModelOptions,
                   BucketBatchSamplerOptions, Cifar100Options, Cifar10Options,
                   CollectiveOptions, CsvOptions, DataLoaderOptions,
                   DataParallelOptions, DistributedDataParallelOptions,
                   DistributedSamplerOptions, DistributedWeightedSamplerOptions,
                   GradScalerOptions, HierarchicalModelAveragerOptions,
                   ImageFolderOptions, InitProcessGroupOptions, JoinOptions,
                   LoadModelOptions, LoadSnapshotOptions, LoadStateDictOptions,
                   MixedPrecision, MnistOptions, MonitoredBarrierOptions,
                   NewGroupOptions, ObjectOptions, PeriodicModelAveragerOptions,
                   PointToPointOptions, PostLocalSGDOptions, PowerSGDOptions,
                   ProfilerOptions, ProfilerSchedule, RandomCropOptions,
                   RandomResizedCropOptions, RandomSamplerOptions,
                   ReductionOptions, ResizeOptions, SafetensorsOptions,
                   SnapshotOptions, SpawnOptions, SplitGroupOptions,
                   SubsetRandomSamplerOptions, TokenOptions, UpdateBnOptions,
                   WeightedRandomSamplerOptions, ZeroRedundancyOptions,
                   metrics::AccuracyOptions, metrics::ConfusionMatrixOptions,
                   metrics::MetricOptions, metrics::PerplexityOptions,
                   optim::AdamOptions, optim::AdamWOptions,
                   optim::ChainedSchedulerOptions, optim::ConstantLROptions,
                   optim::CosineAnnealingLROptions,
                   optim::CosineAnnealingWarmRestartsOptions,
                   optim::CyclicLROptions, optim::ExponentialLROptions,
                   optim::LambdaLROptions, optim::LinearLROptions,
                   optim::LinearScalingOptions, optim::MultiStepLROptions,
                   optim::MultiplicativeLROptions, optim::OneCycleLROptions,
                   optim::PolynomialLROptions, optim::ReduceLROnPlateauOptions,
                   optim::SGDOptions, optim::SWALROptions,
                   optim::SequentialLROptions, optim::StepLROptions>));
  EXPECT_TRUE((kAggregates<ContextShardOptions, RingAttentionOptions,
                           UlyssesAttentionOptions>));
  EXPECT_TRUE((kAggregates<MetricsLoggerOptions, SummaryWriterOptions,
                           SystemMetricsSamplerOptions>));
  EXPECT_TRUE((kAggregates<PipelineCosts, PipelineOptions>));
  EXPECT_TRUE((kDefaults<DataLoaderOptions, DistributedDataParallelOptions,
                         InitProcessGroupOptions, ZeroRedundancyOptions>));
}

TEST(PublicOptions, ThatMustBeGivenDoNotCompileIfLeftOut) {
  EXPECT_FALSE(
      (kAnyDefault<HierarchicalModelAveragerOptions, PipelineOptions,
                   metrics::ConfusionMatrixOptions,
                   optim::ChainedSchedulerOptions,
                   optim::CosineAnnealingLROptions,
                   optim::CosineAnnealingWarmRestartsOptions,
                   optim::CyclicLROptions, optim::ExponentialLROptions,
                   optim::LambdaLROptions, optim::LinearScalingOptions,
                   optim::MultiStepLROptions, optim::MultiplicativeLROptions,
                   optim::OneCycleLROptions, optim::SWALROptions,
                   optim::SequentialLROptions, optim::StepLROptions>));
}

TEST(PublicOptions, HaveOptionalTimeouts) {
  EXPECT_TRUE((kOptionalTimeouts<AllToAllSingleOptions, CollectiveOptions,
                                 DataLoaderOptions, InitProcessGroupOptions,
                                 MonitoredBarrierOptions, NewGroupOptions,
                                 ObjectOptions, PointToPointOptions,
                                 ReductionOptions, SplitGroupOptions>));
  EXPECT_TRUE((kOptionalTimeouts<ContextShardOptions, RingAttentionOptions,
                                 UlyssesAttentionOptions>));
  EXPECT_TRUE((std::is_same_v<decltype(SpawnOptions::grace_period), Timeout>));
  const CollectiveOptions given{.timeout = std::chrono::seconds(3)};
  EXPECT_EQ(given.timeout, milliseconds(3000));
  EXPECT_EQ(CollectiveOptions{}.timeout, std::nullopt);
}

// The guard of init_process_group() is given wherever a group is.
TEST(PublicOptions, TakeTheGuardAsTheirGroup) {
  EXPECT_TRUE((std::is_convertible_v<ProcessGroupGuard&, ProcessGroupPtr>));
  EXPECT_FALSE((std::is_convertible_v<ProcessGroupGuard, ProcessGroupPtr>));
  const auto group = init_process_group();
  EXPECT_EQ((CollectiveOptions{.group = group}).group, default_group());
  EXPECT_EQ(
      (DistributedDataParallelOptions{.process_group = group}).process_group,
      default_group());
  EXPECT_EQ((SnapshotOptions{.group = group}).group, default_group());
}

}  // namespace
}  // namespace lockstep
