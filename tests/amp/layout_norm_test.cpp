// Norms and overflows of models whose parameters are divided over several
// groups of ranks, by layouts that are made by hand.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "tests/amp/sharded_sgd.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::ShardedSgd;
using testing::with_gradients;
using testing::World;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Whole gradients, the same numbers on every rank.
std::vector<at::Tensor> whole_gradients(at::ScalarType dtype) {
  torch::manual_seed(11);
  return {torch::randn({6, 5}).to(dtype), torch::randn({7}).to(dtype) * 3,
          torch::randn({5, 4}).to(dtype) * 2, torch::randn({3}).to(dtype),
          torch::randn({4, 3}).to(dtype)};
}

// Returns a parameter whose gradient is the part of `whole` that `layout`,
// which needs no shape, says.
at::Tensor parameter_of(const at::Tensor& whole, TensorLayout layout) {
  layout.shape = whole.sizes().vec();
  auto part = whole;
  for (int64_t d = 0; d < whole.dim(); ++d) {
    const auto dim = static_cast<size_t>(d);
    part = part.narrow(d, layout.box.offsets[dim], layout.box.sizes[dim]);
  }
  if (layout.range) {
    part = part.reshape({-1}).slice(0, layout.range->begin, layout.range->end);
  }
  auto parameter = with_gradients({part.contiguous()}).front();
  set_layout(parameter, std::move(layout));
  return parameter;
}

// The elements of `box` that the rank gets if they are divided evenly.
Range even_range(const Box& box, const ProcessGroupPtr& group) {
  const int64_t count = box.numel();
  return {count * group->rank() / group->size(),
          count * (group->rank() + 1) / group->size()};
}

// Four ranks are 2 x 2, other worlds have one axis.
struct Axes {
  ProcessGroupPtr tensor;  // neighbours
  ProcessGroupPtr shard;

  explicit Axes(const World& world) {
    if (world.size == 4) {
      tensor = new_subgroups(2);
      shard = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
    } else {
      tensor = new_subgroups(1);
      shard = new_group();
    }
  }

  TensorLayout by_tensor(const Sizes& shape, size_t dim) const {
    return {.box = chunk_box(shape, dim, tensor->rank(), tensor->size()),
            .groups = {tensor}};
  }
  TensorLayout by_shard(TensorLayout layout) const {
    layout.range = even_range(layout.box, shard);
    layout.groups.push_back(shard);
    return layout;
  }
  TensorLayout by_shard(const Sizes& shape) const {
    return by_shard(TensorLayout{.box = whole_box(shape)});
  }
};

// The parts of whole_gradients() in a model of every kind of division. The
// fourth parameter has no layout, the last one stands twice among the ranks.
std::vector<at::Tensor> parts(const Axes& axes, at::ScalarType dtype) {
  const auto whole = whole_gradients(dtype);
  auto duplicate = axes.by_shard(whole[4].sizes().vec());
  auto counted = duplicate;
  duplicate.duplicate = true;
  return {parameter_of(whole[0], axes.by_shard(axes.by_tensor({6, 5}, 0))),
          parameter_of(whole[1], axes.by_shard({7})),
          parameter_of(whole[2], axes.by_tensor({5, 4}, 1)),
          with_gradients({whole[3]}).front(),
          parameter_of(whole[4], counted),
          parameter_of(whole[4], duplicate)};
}

void expect_norm_of_whole(const Axes& axes, at::ScalarType dtype,
                          double norm_type) {
  auto whole = with_gradients(whole_gradients(dtype));
  const auto expected = clip_grad_norm_(whole, 1e-3, norm_type);
  auto mine = parts(axes, dtype);
  const double bound = dtype == at::kDouble ? 1e-12 : 1e-6;
  torch::optim::SGD optimizer(mine, 0.1);
  for (const auto& norm : {get_total_norm(optimizer, norm_type),
                           clip_grad_norm_(mine, 1e-3, norm_type)}) {
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    EXPECT_NEAR(norm.item<double>() / expected.item<double>(), 1, bound)
        << norm_type;
  }
  whole.push_back(whole.back());
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto* layout = layout_of(mine[i]);
    const auto like =
        layout == nullptr ? whole[i] : parameter_of(whole[i].grad(), *layout);
    EXPECT_TRUE(torch::allclose(mine[i].grad(), like.grad(), 2 * bound, 0))
        << i;
  }
}

WORLD_TEST(LayoutNorm, IsThatOfTheWholeModel, 1, 2, 3, 4) {
  auto group = init_process_group("gloo");
  const Axes axes(world);
  for (auto dtype : {at::kFloat, at::kDouble}) {
    for (double norm_type : {1.0, 2.0, 3.5, -2.0, kInf, -kInf}) {
      expect_norm_of_whole(axes, dtype, norm_type);
    }
  }
  auto mine = parts(axes, at::kFloat);
  EXPECT_THAT(message_of([&] { clip_grad_norm_(mine, 1, 0); }),
              HasSubstr("divided over ranks"));
  clip_grad_value_(mine, 0.25);
  for (const auto& parameter : mine) {
    EXPECT_TRUE(parameter.grad().abs().le(0.25).all().item<bool>());
  }
}

// The norms of bfloat16 are summed in wider types.
WORLD_TEST(LayoutNorm, OfHalfTypesIsThatOfTheWholeModel, 4) {
  auto group = init_process_group("gloo");
  const auto whole = with_gradients(whole_gradients(at::kBFloat16));
  auto mine = parts(Axes(world), at::kBFloat16);
  double squares = 0;
  for (const auto& parameter : whole) {
    squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(clip_grad_norm_(mine, 1).item<double>() / std::sqrt(squares), 1,
              1e-6);
}

// Parameters without gradients, and gradients that only one rank has, are not
// a reason to wait.
WORLD_TEST(LayoutNorm, GradientsMayBeMissing, 2, 4) {
  auto group = init_process_group("gloo");
  auto mine = parts(Axes(world), at::kDouble);
  for (auto& parameter : mine) parameter.mutable_grad().reset();
  EXPECT_EQ(clip_grad_norm_(mine, 1).item<double>(), 0);
  mine = parts(Axes(world), at::kDouble);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (i != 1) mine[i].mutable_grad().reset();
  }
  EXPECT_NEAR(clip_grad_norm_(mine, 1).item<double>(),
              whole_gradients(at::kDouble)[1].norm().item<double>(), 1e-12);
}

WORLD_TEST(LayoutNorm, OneRanksNanIsEveryRanks, 2, 4) {
  auto group = init_process_group("gloo");
  const Axes axes(world);
  for (double norm_type : {2.0, kInf, -kInf}) {
    auto mine = parts(axes, at::kFloat);
    if (world.rank == 1) mine[0].grad().fill_(NAN);
    EXPECT_THROW(clip_grad_norm_(mine, 1, norm_type, true), std::runtime_error);
    EXPECT_TRUE(std::isnan(clip_grad_norm_(mine, 1, norm_type).item<double>()));
  }
}

// Two stages of two ranks. The first divides its weight over a group that the
// second does not have, so the ranks of a pipeline's group have different sets
// of groups, and one of them must wait for the other.
struct Stages {
  ProcessGroupPtr pipeline;
  ProcessGroupPtr inner;
  bool first;

  Stages(const World& world, bool pipeline_has_the_first_name)
      : first(world.rank < 2) {
    const auto make_pipeline = [&] {
      pipeline = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
    };
    if (pipeline_has_the_first_name) make_pipeline();
    inner = new_subgroups(2);
    if (!pipeline_has_the_first_name) make_pipeline();
  }

  // The first stage has whole_gradients() 0, 1 and 4, the second one 2 and 3,
  // and also 4, tied to the first's.
  std::vector<at::Tensor> parameters(at::ScalarType dtype) const {
    const auto whole = whole_gradients(dtype);
    const auto of_stage = [&](const at::Tensor& tensor) {
      return TensorLayout{.box = whole_box(tensor.sizes().vec()),
                          .groups = {pipeline}};
    };
    if (!first) {
      auto tied = of_stage(whole[4]);
      tied.duplicate = true;
      return {parameter_of(whole[2], of_stage(whole[2])),
              parameter_of(whole[3], of_stage(whole[3])),
              parameter_of(whole[4], tied)};
    }
    const TensorLayout divided{.box = chunk_box({6, 5}, 0, inner->rank(), 2),
                               .groups = {pipeline, inner}};
    return {parameter_of(whole[0], divided),
            parameter_of(whole[1], of_stage(whole[1])),
            parameter_of(whole[4], of_stage(whole[4]))};
  }
};

WORLD_TEST(LayoutNorm, StagesMayDivideTheirParametersDifferently, 4) {
  auto group = init_process_group("gloo");
  for (const bool pipeline_first : {true, false}) {
    const Stages stages(world, pipeline_first);
    for (double norm_type : {1.0, 2.0, kInf, -kInf}) {
      const auto expected = clip_grad_norm_(
          with_gradients(whole_gradients(at::kDouble)), 1, norm_type);
      auto mine = stages.parameters(at::kDouble);
      EXPECT_NEAR(clip_grad_norm_(mine, 1, norm_type).item<double>() /
                      expected.item<double>(),
                  1, 1e-12)
          << norm_type;
    }
  }
}

WORLD_TEST(LayoutNorm, ContradictingOrdersAreAnErrorOnAllRanks, 2) {
  auto group = init_process_group("gloo");
  const auto a = new_group();
  const auto b = new_group();
  auto mine = with_gradients({torch::ones({3}), torch::ones({3})});
  set_layout(mine[0], {.shape = {3}, .box = {{0}, {3}}, .groups = {a, b}});
  set_layout(mine[1], {.shape = {3}, .box = {{0}, {3}}, .groups = {b, a}});
  EXPECT_THAT(message_of([&] { clip_grad_norm_(mine, 1); }),
              HasSubstr("in orders that contradict each other"));
}

WORLD_TEST(LayoutNorm, AShardedOptimizerOfPartsIsRefused, 2) {
  auto group = init_process_group("gloo");
  ShardedSgd optimizer(parts(Axes(world), at::kFloat), 0.1, group.get());
  EXPECT_THAT(message_of([&] { get_total_norm(optimizer); }),
              HasSubstr("parts of parts"));
}

// Whichever rank finds the infinity, all skip the step.
WORLD_TEST(LayoutScaler, OneRanksInfinitySkipsAllSteps, 2, 4) {
  auto group = init_process_group("gloo");
  const auto expect_skipped = [&](std::vector<at::Tensor> mine, int where) {
    torch::optim::SGD optimizer(mine, 0.5);
    GradScaler scaler({.device = at::kCPU, .init_scale = 8});
    scaler.scale(torch::ones({}));
    if (world.rank == where) mine[0].grad().view({-1})[0] = kInf;
    scaler.step(optimizer);
    EXPECT_TRUE(scaler.found_inf(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_TRUE(mine[0].eq(0).all().item<bool>());
  };
  const Axes axes(world);
  std::optional<Stages> stages;
  if (world.size == 4) stages.emplace(world, true);
  for (int where = 0; where < world.size; ++where) {
    expect_skipped(parts(axes, at::kFloat), where);
    // All ranks of a stage have the same values, unless they are divided.
    if (stages && where < 2) {
      expect_skipped(stages->parameters(at::kFloat), where);
    }
  }
  auto mine = parts(axes, at::kFloat);
  torch::optim::SGD optimizer(mine, 0.5);
  GradScaler scaler({.device = at::kCPU, .init_scale = 8});
  scaler.scale(torch::ones({}));
  scaler.step(optimizer);
  EXPECT_FALSE(scaler.found_inf(optimizer));
}

// In a pipeline only the rank of the last stage has a loss. Another one threw,
// as if scale() had been forgotten.
WORLD_TEST(LayoutScaler, OneRankScalesTheLossForAll, 2, 4) {
  auto group = init_process_group("gloo");
  auto mine = parts(Axes(world), at::kFloat);
  torch::optim::SGD optimizer(mine, 0.5);
  GradScaler scaler({.device = at::kCPU, .init_scale = 8});
  EXPECT_THAT(
      message_of([&] { scaler.step(optimizer); }),
      HasSubstr("step: no loss was scaled yet by any of the ranks that"));
  EXPECT_THAT(message_of([&] { scaler.update(); }),
              HasSubstr("no optimizer with gradients was stepped"));
  mine[0].mutable_grad().fill_(8);
  if (world.rank == 1) scaler.scale(torch::ones({}));
  scaler.step(optimizer);
  scaler.update(2.0);
  EXPECT_TRUE(mine[0].grad().eq(1).all().item<bool>());
  EXPECT_EQ(scaler.get_scale(), 2);
}

}  // namespace
}  // namespace lockstep::internal
