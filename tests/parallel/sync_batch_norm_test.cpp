// SyncBatchNorm on the parts of a batch equals BatchNorm in one process on all
// of it: outputs, gradients and running statistics.

#include "lockstep/parallel/nn/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using nn::SyncBatchNorm1d;
using nn::SyncBatchNorm2d;
using nn::SyncBatchNorm3d;
using nn::SyncBatchNormOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm3d;

constexpr int64_t kChannels = 3;
// Only the order of summation differs, on values around 1.
constexpr double kFloatBound = 2e-6;
constexpr double kDoubleBound = 1e-14;

struct Batches {
  std::vector<int64_t> rows;   // of each rank
  std::vector<int64_t> sizes;  // of a sample: channels first
  at::ScalarType dtype = at::kFloat;
  double bound = kFloatBound;
  at::MemoryFormat layout = at::MemoryFormat::Contiguous;
  int steps = 3;

  int64_t total() const {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  }
  int64_t begin(int rank) const {
    return std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0});
  }
  at::Tensor random(int seed) const {
    std::vector<int64_t> shape{total()};
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    torch::manual_seed(seed);
    return torch::randn(shape, at::kDouble).to(dtype);
  }
};

std::vector<int64_t> even(int ranks) {
  return std::vector<int64_t>(static_cast<size_t>(ranks), 4);
}
std::vector<int64_t> uneven(int ranks) {
  std::vector<int64_t> rows{2, 5, 3};
  rows.resize(static_cast<size_t>(ranks));
  return rows;
}
std::vector<int64_t> none_on(int empty, int ranks) {
  auto rows = uneven(ranks);
  rows[static_cast<size_t>(empty)] = 0;
  return rows;
}

void expect_near(const at::Tensor& have, const at::Tensor& want, double bound,
                 const std::string& what) {
  ASSERT_EQ(have.sizes(), want.sizes()) << what;
  ASSERT_EQ(have.scalar_type(), want.scalar_type()) << what;
  if (want.numel() == 0) return;
  auto error = (have.to(at::kDouble) - want.to(at::kDouble)).abs().max();
  auto size = want.to(at::kDouble).abs().max();
  EXPECT_LE(error.item<double>(), bound * (1 + size.item<double>()))
      << what << "\n"
      << have << "\nwanted\n"
      << want;
}

void expect_same_bits_on_all_ranks(const at::Tensor& tensor, int ranks) {
  if (ranks == 1) return;
  std::vector<at::Tensor> all;
  for (int i = 0; i < ranks; ++i) all.push_back(at::empty_like(tensor));
  all_gather(all, tensor.detach());
  for (const auto& each : all) EXPECT_TRUE(each.equal(all[0]));
}

template <typename Sync, typename Plain>
void expect_equal_states(const Sync& sync, const Plain& plain, double bound,
                         int ranks) {
  auto have = sync->named_buffers();
  for (const auto& item : plain->named_buffers()) {
    expect_near(have[item.key()], item.value(), bound, item.key());
    expect_same_bits_on_all_ranks(have[item.key()], ranks);
  }
}

// Trains both modules; `sync` gets only this rank's part.
template <typename Sync, typename Plain>
void expect_same(const World& world, Sync sync, Plain plain,
                 const Batches& batches) {
  sync->to(batches.dtype);
  plain->to(batches.dtype);
  if (plain->weight.defined()) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    plain->weight.uniform_(0.5, 1.5);
    plain->bias.uniform_(-1, 1);
    sync->weight.copy_(plain->weight);
    sync->bias.copy_(plain->bias);
  }
  auto part_of = [&](const at::Tensor& whole) {
    return whole.narrow(0, batches.begin(world.rank), batches.rows[world.rank]);
  };
  for (int step = 0; step < batches.steps; ++step) {
    auto values = batches.random(2 * step) * 2 + 1 + step;
    auto target = batches.random(2 * step + 1);
    plain->zero_grad();
    sync->zero_grad();
    auto whole = values.clone(batches.layout).requires_grad_();
    auto want = plain(whole);
    (want.sin() * target).sum().backward();

    auto part = part_of(values).clone(batches.layout).requires_grad_();
    auto have = sync(part);
    EXPECT_TRUE(have.is_contiguous(batches.layout));
    (have.sin() * part_of(target)).sum().backward();

    expect_near(have, part_of(want), batches.bound, "output");
    expect_near(part.grad(), part_of(whole.grad()), batches.bound,
                "gradient of the input");
    if (plain->weight.defined()) {  // local gradients, which DDP would average
      auto weight = sync->weight.grad().clone();
      auto bias = sync->bias.grad().clone();
      if (world.size > 1) {
        all_reduce(weight);
        all_reduce(bias);
      }
      expect_near(weight, plain->weight.grad(), batches.bound, "weight");
      expect_near(bias, plain->bias.grad(), batches.bound, "bias");
    }
    expect_equal_states(sync, plain, batches.bound, world.size);
  }
  sync->eval();
  plain->eval();
  auto values = batches.random(99);
  expect_near(sync(part_of(values)), part_of(plain(values)), batches.bound,
              "output in eval mode");
}

template <typename Sync, typename Plain>
void expect_same_of_all_sizes(const World& world,
                              const std::vector<int64_t>& sizes,
                              at::MemoryFormat layout) {
  auto group = init_process_group();
  auto splits = {even(world.size), uneven(world.size), none_on(0, world.size),
                 none_on(world.size - 1, world.size)};
  for (const auto& rows : splits) {
    if (rows == std::vector<int64_t>{0}) continue;
    for (auto dtype : {at::kFloat, at::kDouble}) {
      expect_same(world, Sync(kChannels), Plain(kChannels),
                  {.rows = rows,
                   .sizes = sizes,
                   .dtype = dtype,
                   .bound = dtype == at::kFloat ? kFloatBound : kDoubleBound,
                   .layout = layout});
    }
  }
}

WORLD_TEST(SyncBatchNorm, OneDimensionOfSamples, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm1d, BatchNorm1d>(
      world, {kChannels}, at::MemoryFormat::Contiguous);
}
WORLD_TEST(SyncBatchNorm, OneDimensionOfSequences, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm1d, BatchNorm1d>(
      world, {kChannels, 7}, at::MemoryFormat::Contiguous);
}
WORLD_TEST(SyncBatchNorm, TwoDimensions, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm2d, BatchNorm2d>(
      world, {kChannels, 5, 4}, at::MemoryFormat::Contiguous);
}
WORLD_TEST(SyncBatchNorm, TwoDimensionsChannelsLast, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm2d, BatchNorm2d>(
      world, {kChannels, 5, 4}, at::MemoryFormat::ChannelsLast);
}
WORLD_TEST(SyncBatchNorm, ThreeDimensions, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm3d, BatchNorm3d>(
      world, {kChannels, 2, 3, 4}, at::MemoryFormat::Contiguous);
}
WORLD_TEST(SyncBatchNorm, ThreeDimensionsChannelsLast, 1, 2, 3) {
  expect_same_of_all_sizes<SyncBatchNorm3d, BatchNorm3d>(
      world, {kChannels, 2, 3, 4}, at::MemoryFormat::ChannelsLast3d);
}

WORLD_TEST(SyncBatchNorm, OverGloo, 2, 3) {
  auto group = init_process_group("gloo");
  expect_same(world, SyncBatchNorm2d(kChannels), BatchNorm2d(kChannels),
              {.rows = uneven(world.size), .sizes = {kChannels, 5, 4}});
}

WORLD_TEST(SyncBatchNorm, OptionsMeanWhatBatchNormsMean, 1, 2, 3) {
  auto group = init_process_group();
  using torch::nn::BatchNormOptions;
  for (const auto& options :
       {BatchNormOptions(kChannels).affine(false),
        BatchNormOptions(kChannels).momentum(std::nullopt),
        BatchNormOptions(kChannels).track_running_stats(false),
        BatchNormOptions(kChannels).eps(0.5).momentum(0.7)}) {
    for (auto dtype : {at::kFloat, at::kDouble}) {
      auto bound = dtype == at::kFloat ? kFloatBound : kDoubleBound;
      Batches batches{.rows = uneven(world.size),
                      .sizes = {kChannels, 2, 2},
                      .dtype = dtype,
                      .bound = bound};
      if (!options.track_running_stats()) {
        // Without running statistics, eval mode uses those of each rank's part
        // alone.
        batches.rows = {5};
        batches.rows.resize(static_cast<size_t>(world.size), 0);
      }
      expect_same(world, SyncBatchNorm2d(options), BatchNorm2d(options),
                  batches);
    }
  }
}

WORLD_TEST(SyncBatchNorm, OptionsAreBatchNorms, 1) {
  SyncBatchNorm2d built(
      SyncBatchNormOptions(4).eps(1e-3).momentum(std::nullopt).affine(false));
  auto copied = SyncBatchNormOptions(torch::nn::BatchNormOptions(4)
                                         .eps(1e-3)
                                         .momentum(std::nullopt)
                                         .affine(false));
  for (const auto& options : {built->options, copied}) {
    EXPECT_EQ(options.num_features(), 4);
    EXPECT_EQ(options.eps(), 1e-3);
    EXPECT_EQ(options.momentum(), std::nullopt);
    EXPECT_FALSE(options.affine());
    EXPECT_TRUE(options.track_running_stats());
    EXPECT_EQ(options.process_group(), nullptr);
  }
  std::ostringstream text;
  text << *built;
  EXPECT_EQ(text.str(),
            "lockstep::nn::SyncBatchNorm2d(4, eps=0.001, momentum=None, "
            "affine=false, track_running_stats=true)");
}

// The statistics of half inputs are float32: only the output is rounded.
WORLD_TEST(SyncBatchNorm, HalfInputs, 1, 2, 3) {
  auto group = init_process_group();
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    for (auto parameters : {at::kFloat, dtype}) {
      Batches batches{.rows = none_on(world.size - 1, world.size),
                      .sizes = {kChannels, 5, 4},
                      .dtype = dtype};
      if (world.size == 1) batches.rows = {4};
      SyncBatchNorm2d sync(kChannels);
      BatchNorm2d exact(kChannels);
      sync->to(parameters);
      auto values = batches.random(0) + 4;
      auto target = batches.random(1);
      auto whole = values.to(at::kFloat).requires_grad_();
      (exact(whole) * target).sum().backward();
      auto part_of = [&](const at::Tensor& tensor) {
        return tensor.narrow(0, batches.begin(world.rank),
                             batches.rows[world.rank]);
      };
      auto part = part_of(values).clone().requires_grad_();
      auto have = sync(part);
      EXPECT_EQ(have.scalar_type(), dtype);
      (have * part_of(target)).sum().backward();
      EXPECT_EQ(part.grad().scalar_type(), dtype);
      EXPECT_EQ(sync->weight.grad().scalar_type(), parameters);
      const double rounding = dtype == at::kHalf ? 1.0 / 2048 : 1.0 / 256;
      torch::NoGradGuard no_grad;
      expect_near(part.grad().to(at::kFloat), part_of(whole.grad()), rounding,
                  "gradient of the input");
      const double state = parameters == at::kFloat ? kFloatBound : rounding;
      expect_near(sync->running_mean.to(at::kFloat), exact->running_mean, state,
                  "running mean");
      expect_near(sync->running_var.to(at::kFloat), exact->running_var, state,
                  "running variance");
      exact->eval();  // with the statistics of another batch: the same rounding
      sync->eval();
      expect_near(sync(part).to(at::kFloat), part_of(exact(whole)),
                  4 * rounding, "output in eval mode");
    }
  }
}

// If the mean is 1e4 times the deviation, float32 sums of squares lose the
// variance.
WORLD_TEST(SyncBatchNorm, KeepsTheVarianceBesideALargeMean, 2, 3) {
  auto group = init_process_group();
  torch::manual_seed(0);
  auto whole = torch::randn({world.size * 64, kChannels}, torch::kDouble) + 1e4;
  SyncBatchNorm1d sync(SyncBatchNormOptions(kChannels).momentum(1));
  sync(whole.narrow(0, world.rank * 64, 64).to(torch::kFloat));
  auto rounded = whole.to(torch::kFloat).to(torch::kDouble);
  expect_near(sync->running_var.to(torch::kDouble), rounded.var(0), kFloatBound,
              "variance");
}

WORLD_TEST(SyncBatchNorm, NormalisesWithinItsGroup, 3) {
  auto group = init_process_group();
  auto pair = new_group({0, 2});
  if (world.rank == 1) return;
  Batches batches{.rows = {4, 3}, .sizes = {kChannels}};
  auto whole = batches.random(0);
  SyncBatchNorm1d sync(SyncBatchNormOptions(kChannels).process_group(pair));
  BatchNorm1d plain(kChannels);
  int rank = pair->rank();
  auto have = sync(whole.narrow(0, batches.begin(rank), batches.rows[rank]));
  auto want = plain(whole);
  expect_near(have, want.narrow(0, batches.begin(rank), batches.rows[rank]),
              kFloatBound, "output");
}

WORLD_TEST(SyncBatchNorm, FreezingTheInputLeavesBackwardLocal, 2) {
  auto group = init_process_group();
  SyncBatchNorm1d sync(kChannels);
  auto out = sync(torch::randn({4, kChannels}));
  if (world.rank == 0) {  // would wait for rank 1 if it communicated
    out.sum().backward();
    EXPECT_TRUE(sync->bias.grad().equal(torch::full({kChannels}, 4.0)));
  }
}

WORLD_TEST(SyncBatchNorm, WithoutGradientsItIsTheSame, 2) {
  auto group = init_process_group();
  Batches batches{.rows = {2, 5}, .sizes = {kChannels}};
  auto whole = batches.random(0);
  auto part =
      whole.narrow(0, batches.begin(world.rank), batches.rows[world.rank]);
  SyncBatchNorm1d sync(kChannels);
  torch::NoGradGuard no_grad;
  auto have = sync(part);
  EXPECT_FALSE(have.requires_grad());
  expect_near(have,
              BatchNorm1d(kChannels)(whole).narrow(0, batches.begin(world.rank),
                                                   batches.rows[world.rank]),
              kFloatBound, "output");
}

WORLD_TEST(SyncBatchNorm, NoSamplesAnywhereLeaveTheStatisticsAlone, 2) {
  auto group = init_process_group();
  SyncBatchNorm1d sync(kChannels);
  auto input = torch::zeros({0, kChannels}).requires_grad_();
  auto out = sync(input);
  out.sum().backward();
  EXPECT_EQ(out.sizes(), input.sizes());
  EXPECT_EQ(input.grad().sizes(), input.sizes());
  EXPECT_TRUE(sync->weight.grad().equal(torch::zeros({kChannels})));
  EXPECT_TRUE(sync->running_mean.equal(torch::zeros({kChannels})));
  EXPECT_TRUE(sync->running_var.equal(torch::ones({kChannels})));
}

WORLD_TEST(SyncBatchNorm, WithoutAProcessGroupItIsBatchNorm, 1) {
  expect_same(world, SyncBatchNorm2d(kChannels), BatchNorm2d(kChannels),
              {.rows = {4}, .sizes = {kChannels, 2, 2}, .bound = 0});
}

WORLD_TEST(SyncBatchNorm, EvalModeNeedsNoPeers, 2) {
  auto group = init_process_group();
  if (world.rank == 1) return;
  SyncBatchNorm1d sync(kChannels);
  sync->eval();
  expect_near(sync(torch::ones({1, kChannels})),
              torch::ones({1, kChannels}) / std::sqrt(1 + 1e-5), kFloatBound,
              "output");
  SyncBatchNorm1d untracked(
      SyncBatchNormOptions(kChannels).track_running_stats(false));
  untracked->eval();
  BatchNorm1d plain(kChannels);
  auto values = torch::randn({4, kChannels});
  EXPECT_TRUE(untracked(values).equal(plain(values)));
}

WORLD_TEST(SyncBatchNorm, ClonesAreOfTheirOwn, 1) {
  auto group = init_process_group();
  SyncBatchNorm1d sync(
      SyncBatchNormOptions(kChannels).process_group(default_group()));
  sync(torch::randn({4, kChannels}));
  auto copy = std::dynamic_pointer_cast<nn::SyncBatchNorm1dImpl>(sync->clone());
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->options.process_group(), default_group());
  EXPECT_TRUE(copy->running_mean.equal(sync->running_mean));
  EXPECT_FALSE(copy->running_mean.is_same(sync->running_mean));
  EXPECT_TRUE(
      copy->named_buffers()["running_mean"].is_same(copy->running_mean));
  EXPECT_TRUE(copy->weight.requires_grad());
}

WORLD_TEST(SyncBatchNorm, RefusesWhatItCannotNormalise, 1, 2) {
  auto group = init_process_group();
  auto refuses = [](auto module, const at::Tensor& input, auto message) {
    EXPECT_THAT([&] { module(input); },
                ThrowsMessage<std::invalid_argument>(message));
    EXPECT_EQ(module->num_batches_tracked.template item<int64_t>(), 0);
  };
  refuses(SyncBatchNorm1d(3), torch::ones({3}),
          HasSubstr("SyncBatchNorm1d: expected 2D or 3D input (got 1D input)"));
  refuses(SyncBatchNorm1d(3), torch::ones({2, 3, 4, 4}),
          HasSubstr("expected 2D or 3D input (got 4D input)"));
  refuses(SyncBatchNorm2d(3), torch::ones({2, 3, 4}),
          HasSubstr("SyncBatchNorm2d: expected 4D input (got 3D input)"));
  refuses(SyncBatchNorm3d(3), torch::ones({2, 3, 4, 4}),
          HasSubstr("SyncBatchNorm3d: expected 5D input (got 4D input)"));
  refuses(SyncBatchNorm1d(3), torch::ones({2, 4}),
          AllOf(HasSubstr("expected input with 3 channels"),
                HasSubstr("got input size [2, 4]")));
  if (world.size == 1) return;
  refuses(SyncBatchNorm1d(3), torch::ones({2, 3}, torch::kDouble),
          AllOf(HasSubstr("got Double input, but the module has Float"),
                HasSubstr("to(dtype)")));
  refuses(SyncBatchNorm1d(3), torch::ones({2, 3}, torch::kLong),
          HasSubstr("expected floating-point input, got Long"));
}

WORLD_TEST(SyncBatchNorm, OneValueAChannelIsRefusedOnEveryRank, 1, 2, 3) {
  auto group = init_process_group();
  SyncBatchNorm1d sync(kChannels);
  auto input = torch::ones({world.rank == 0 ? 1 : 0, kChannels});
  EXPECT_THAT([&] { sync(input); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "Expected more than 1 value per channel when training")));
  EXPECT_TRUE(sync->running_var.equal(torch::ones({kChannels})));
  EXPECT_EQ(sync->num_batches_tracked.item<int64_t>(), 0);
  if (world.size == 1) return;
  // One value on each of two ranks is enough.
  sync(torch::ones({world.rank < 2 ? 1 : 0, kChannels}));
}

WORLD_TEST(SyncBatchNorm, SecondDerivativesAreRefused, 2) {
  auto group = init_process_group();
  SyncBatchNorm1d sync(kChannels);
  auto input = torch::randn({4, kChannels}).requires_grad_();
  auto out = sync(input).sum();
  EXPECT_THAT(
      [&] {
        torch::autograd::grad({out}, {input}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true);
      },
      ThrowsMessage<std::runtime_error>(
          HasSubstr("SyncBatchNorm has no second derivative")));
}

}  // namespace
}  // namespace lockstep::internal
