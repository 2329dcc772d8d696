// A parameter that no stage of a pipeline uses gets no gradient, as in one
// process: zeros would be moved by momentum and weight decay.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/pipeline/whole_model.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

// Gives a product that the next stage may use, and one that it does.
struct TwoOutputsImpl : torch::nn::Module {
  TwoOutputsImpl() {
    used = register_parameter("used", torch::ones({kWidth}, torch::kDouble));
    aside = register_parameter("aside", torch::ones({kWidth}, torch::kDouble));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {x * aside, x * used};
  }
  at::Tensor used, aside;
};
TORCH_MODULE(TwoOutputs);
// Uses the first of its inputs only if it is told to.
struct ChoosesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& aside, const at::Tensor& x) {
    return uses ? x + aside : x;
  }
  bool uses = false;
};
TORCH_MODULE(Chooses);

// The gradient of a tensor that no stage uses was zeros, which momentum and
// weight decay take for one.
WORLD_TEST(PipelineUnused, AnOutputBringsNoGradient, 2) {
  auto group = init_process_group();
  for (const char* kind : {"1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"}) {
    SCOPED_TRACE(kind);
    // ZBV has both stages that are compared on one rank.
    const bool on_one_rank = std::string(kind) == "ZBVZeroBubble";
    const auto schedule = on_one_rank ? schedule_looped_bfs(1, 2, 2)
                                      : make_pipeline_schedule(kind, 2, 2, 1);
    TwoOutputs first;
    Chooses second;
    std::vector<PipelineStage> mine;
    if (on_one_rank || world.rank == 0) mine.emplace_back(0, first);
    if (on_one_rank || world.rank == 1) mine.emplace_back(1, second);
    auto alone = split_group({{0}, {1}});
    Pipeline pipeline(mine, {.schedule = schedule,
                             .loss = mse,
                             .group = on_one_rank ? alone : group.get()});
    const bool has_first = on_one_rank || world.rank == 0;
    for (const bool uses : {false, true, false}) {
      second->uses = uses;
      first->zero_grad();
      const Batch batch = batch_of(0, 4);
      pipeline.step(batch.x, batch.y);
      EXPECT_EQ(first->used.grad().defined(), has_first);
      EXPECT_EQ(first->aside.grad().defined(), has_first && uses);
    }
  }
}

// Scales what it gets by a weight, which another stage has, too.
struct MayScaleImpl : torch::nn::Module {
  MayScaleImpl() {
    own = register_parameter("own", torch::ones({kWidth}, torch::kDouble));
    tied = register_parameter("tied", torch::ones({kWidth}, torch::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    return uses ? x * own * tied : x * own;
  }
  bool uses = false;
  at::Tensor own, tied;
};
TORCH_MODULE(MayScale);

// The gradient of a tied weight that no stage used was zeros.
WORLD_TEST(PipelineUnused, ATiedWeightThatNoStageUsesHasNoGradient, 2) {
  on_both_backends([&] {
    MayScale stage;
    std::vector<MayScale> single{MayScale(), MayScale()};
    Pipeline pipeline({{world.rank, stage}},
                      {.schedule = schedule_1f1b(2, 2),
                       .loss = mse,
                       .tied_weights = {{{{0, "tied"}, {1, "tied"}}}}});
    at::Tensor want;
    const std::vector<std::tuple<bool, bool, bool>> steps{
        {false, false, false}, {true, false, false}, {false, true, true},
        {false, false, true},  {true, true, false},  {false, false, false}};
    for (const auto& [first, second, adds] : steps) {
      SCOPED_TRACE(c10::str(first, second, adds));
      if (!adds) {
        stage->zero_grad();
        want.reset();
      }
      stage->uses = world.rank == 0 ? first : second;
      single[0]->uses = first;
      single[1]->uses = second;
      const Batch batch = batch_of(0, 4);
      pipeline.step(batch.x, batch.y);
      for (auto& one : single) one->zero_grad();
      mse(single[1]->forward(single[0]->forward(batch.x)), batch.y).backward();
      for (const auto& one : single) {
        const at::Tensor& part = one->tied.grad();
        if (part.defined()) want = want.defined() ? want + part : part.clone();
      }
      ASSERT_EQ(stage->tied.grad().defined(), want.defined());
      if (!want.defined()) continue;
      EXPECT_LT(distance(stage->tied.grad(), want), kBound);
    }
  });
}

// Trains two pipelines of two stages, replicas of each other, in which none,
// only the second or both use a parameter of the first stage. `make_stage`
// returns a stage from a module and the ranks that have it.
template <class MakeStage>
void expect_none_if_unused(const World& world, const MakeStage& make_stage) {
  auto group = init_process_group();
  const auto pipelines = split_group({{0, 1}, {2, 3}});
  const auto replicas = split_group({{0, 2}, {1, 3}});
  const int replica = world.rank / 2;
  TwoOutputs first;
  Chooses second;
  auto stage = world.rank % 2 == 0 ? make_stage(first, replicas)
                                   : PipelineStage(1, second);
  Pipeline pipeline(
      {stage},
      {.schedule = schedule_1f1b(2, 2), .loss = mse, .group = pipelines});
  const std::vector<std::pair<bool, bool>> steps{
      {false, false}, {false, true}, {true, true}, {false, false}};
  for (const auto& [one, two] : steps) {
    SCOPED_TRACE(c10::str(one, two));
    second->uses = replica == 0 ? one : two;
    stage.module().zero_grad();
    const Batch batch = batch_of(0, 8);
    const int64_t begin = 4 * replica;
    pipeline.step(batch.x.slice(0, begin, begin + 4),
                  batch.y.slice(0, begin, begin + 4));
    if (world.rank % 2 == 1) continue;
    TwoOutputs plain;
    for (int i = 0; i < 2; ++i) {
      Chooses end;
      end->uses = i == 0 ? one : two;
      const auto [aside, x] =
          plain->forward(batch.x.slice(0, 4 * i, 4 * i + 4));
      (mse(end->forward(aside, x), batch.y.slice(0, 4 * i, 4 * i + 4)) / 2)
          .backward();
    }
    for (const auto& item : stage.module().named_parameters()) {
      const auto& got = item.value();
      at::Tensor want = plain->named_parameters()[item.key()].grad();
      if (const auto* layout = layout_of(got); want.defined() && layout) {
        want = part_of(want, *layout).view(got.sizes());
      }
      if (got.numel() == 0) continue;
      ASSERT_EQ(got.grad().defined(), want.defined()) << item.key();
      if (!want.defined()) continue;
      EXPECT_LT(distance(got.grad(), want), kBound) << item.key();
    }
  }
}

// The averaging backward gave zeros to all parameters of the stage.
WORLD_TEST(PipelineUnused, AParameterOfAReplicatedStageHasNoGradient, 4) {
  std::optional<DistributedDataParallel<TwoOutputs>> model;
  expect_none_if_unused(world, [&](const TwoOutputs& module, auto group) {
    model.emplace(
        module, DistributedDataParallelOptions{.process_group = group,
                                               .find_unused_parameters = true});
    return PipelineStage(0, *model);
  });
}

WORLD_TEST(PipelineUnused, AParameterOfADividedStageHasNoGradient, 4) {
  for (const bool shared : {true, false}) {
    SCOPED_TRACE(shared);
    expect_none_if_unused(world, [&](const TwoOutputs& module, auto group) {
      return PipelineStage(
          0, FullyShard(module, {.group = group, .shared_memory = shared}));
    });
  }
}

// As the wrapper itself does.
WORLD_TEST(PipelineUnused, WithoutTheOptionItIsNamed, 2) {
  auto group = init_process_group();
  TwoOutputs first;
  DistributedDataParallel<TwoOutputs> model(first);
  const auto alone = split_group({{0}, {1}});
  Pipeline pipeline(
      {PipelineStage(0, model), {1, Chooses()}},
      {.schedule = schedule_looped_bfs(1, 2, 2), .loss = mse, .group = alone});
  const Batch batch = batch_of(0, 4);
  EXPECT_THAT(message_of([&] { pipeline.step(batch.x, batch.y); }),
              HasSubstr("without a gradient for 'aside'"));
}

// All of the stage is unused, so the averaging backward reaches nothing.
WORLD_TEST(PipelineUnused, AStageThatNobodyUsesHasNoGradients, 2) {
  auto group = init_process_group();
  struct IgnoresImpl : torch::nn::Module {
    IgnoresImpl() {
      scale = register_parameter("scale", torch::ones({1}, torch::kDouble));
    }
    at::Tensor forward(const at::Tensor& aside, const at::Tensor& x) {
      return scale * (ignores ? torch::ones_like(x) : aside + x);
    }
    bool ignores = true;
    at::Tensor scale;
  };
  TwoOutputs first;
  const auto second = std::make_shared<IgnoresImpl>();
  DistributedDataParallel<TwoOutputs> model(first,
                                            {.find_unused_parameters = true});
  const auto alone = split_group({{0}, {1}});
  Pipeline pipeline(
      {PipelineStage(0, model), {1, second}},
      {.schedule = schedule_looped_bfs(1, 2, 2), .loss = mse, .group = alone});
  for (const bool ignores : {true, false, true}) {
    second->ignores = ignores;
    first->zero_grad();
    const Batch batch = batch_of(0, 4);
    pipeline.step(batch.x, batch.y);
    EXPECT_EQ(first->used.grad().defined(), !ignores);
    EXPECT_EQ(first->aside.grad().defined(), !ignores);
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
