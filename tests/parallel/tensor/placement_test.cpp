// Parameters of layers of one's own that are said to be divided: clipping, the
// scaler and snapshots see the whole model. Without that, clipping gave each
// rank another norm, and a snapshot lost parts without a word.

#include "lockstep/comm/placement.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/join/joined_optimizer.h"
#include "lockstep/parallel/model_averaging/averagers.h"
#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kInputs = 4;
constexpr int64_t kHidden = 7;  // does not divide by 2 or 3
constexpr double kPlacementBound = 1e-12;

// A column/row pair of our own; whole if there is no group.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(ProcessGroupPtr ranks = {}, bool says_so = true)
      : group(std::move(ranks)) {
    torch::manual_seed(8);
    const auto f64 = torch::dtype(torch::kDouble);
    auto up_whole = torch::randn({kHidden, kInputs}, f64);
    auto down_whole = torch::randn({kInputs, kHidden}, f64);
    auto bias_whole = torch::randn({kInputs}, f64);
    if (group) {
      up_whole = scatter_to_tensor_group(up_whole, 0, group).clone();
      down_whole =
          scatter_to_tensor_group(down_whole, 1, group).contiguous().clone();
    }
    up = register_parameter("up", up_whole);
    down = register_parameter("down", down_whole);
    bias = register_parameter("bias", bias_whole);
    if (!group || !says_so) return;
    set_placement(up, lockstep::Shard{.dim = 0, .size = kHidden}, group);
    set_placement(down, lockstep::Shard{.dim = -1, .size = kHidden}, group);
  }
  at::Tensor forward(at::Tensor x) {
    if (group) x = copy_to_tensor_group(x, group);
    x = torch::linear(torch::tanh(torch::linear(x, up)), down);
    return (group ? reduce_from_tensor_group(x, group) : x) + bias;
  }
  ProcessGroupPtr group;
  at::Tensor up, down, bias;
};
TORCH_MODULE(Pair);

at::Tensor loss_of(Pair& pair, int step) {
  torch::manual_seed(40 + step);
  const auto x = torch::randn({5, kInputs}, torch::kDouble);
  return pair(x).square().mean();
}

WORLD_TEST(Placement, ADividedLayerTrainsAndIsSavedAsOneProcess, 1, 2, 3) {
  auto group = init_process_group();
  Pair whole, part(group.get());
  using Options = torch::optim::SGDOptions;
  torch::optim::SGD whole_sgd(whole->parameters(), Options(0.3).momentum(0.9));
  torch::optim::SGD sgd(part->parameters(), Options(0.3).momentum(0.9));
  const auto train = [](Pair& pair, torch::optim::SGD& optimizer, int step) {
    optimizer.zero_grad();
    loss_of(pair, step).backward();
    const auto norm = clip_grad_norm_(optimizer, 0.2).item<double>();
    optimizer.step();
    return norm;
  };
  const std::string folder = (world.folder / "pair").string() + "/";
  TrainingState state{.model = part.ptr(), .optimizer = &sgd};
  for (int step = 0; step < 4; ++step) {
    EXPECT_NEAR(train(part, sgd, step), train(whole, whole_sgd, step),
                kPlacementBound);
    if (step == 1) save_snapshot(folder, state);
  }
  const auto itself = [](const at::Tensor& parameter) { return parameter; };
  expect_close_parameters(*part, *whole, kPlacementBound, "parameter", itself);
  const auto all = full_state_dict(*part);
  for (const auto& [name, tensor] : all) {
    expect_close(tensor, whole->named_parameters()[name], kPlacementBound,
                 "full " + name);
  }
  EXPECT_EQ(all.empty(), world.rank != 0);
  verify_replicated(*part, group.get());

  // The snapshot holds the whole model: a part goes on from it, and so does one
  // process.
  Pair loaded, loaded_part(group.get());
  torch::optim::SGD loaded_sgd(loaded->parameters(),
                               Options(0.3).momentum(0.9));
  torch::optim::SGD part_sgd(loaded_part->parameters(),
                             Options(0.3).momentum(0.9));
  TrainingState of_whole{.model = loaded.ptr(), .optimizer = &loaded_sgd};
  TrainingState of_part{.model = loaded_part.ptr(), .optimizer = &part_sgd};
  EXPECT_TRUE(load_snapshot(folder, of_whole));
  EXPECT_TRUE(load_snapshot(folder, of_part));
  for (int step = 2; step < 4; ++step) {
    train(loaded, loaded_sgd, step);
    train(loaded_part, part_sgd, step);
  }
  expect_close_parameters(*loaded, *whole, kPlacementBound, "loaded", itself);
  expect_close_parameters(*loaded_part, *whole, kPlacementBound, "loaded part",
                          itself);
  if (world.size > 1) {
    EXPECT_THAT(message_of([&] { save_snapshot(folder + "one.pt", state); }),
                HasSubstr("up is divided over ranks"));
  }
}

// One expert a rank, and what all share.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(const std::vector<int>& numbers, bool same_name = false)
      : shared(register_module("shared", torch::nn::Linear(3, 3))) {
    for (const int number : numbers) {
      torch::manual_seed(number);
      auto& expert = experts.emplace_back(torch::nn::Linear(3, 3));
      register_module("expert" + (same_name ? "" : std::to_string(number)),
                      expert);
      if (numbers.size() > 1) continue;
      for (const auto& one : expert->parameters()) set_placement(one, Own{});
    }
    torch::manual_seed(99);
    shared->reset_parameters();
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum;
    for (auto& expert : experts) {
      const at::Tensor one = expert(shared(x)).square().sum();
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  }
  torch::nn::Linear shared;
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

WORLD_TEST(Placement, OneExpertARankTrainsAndIsSavedAsOneProcess, 2, 3) {
  auto group = init_process_group();
  std::vector<int> numbers;
  for (int rank = 0; rank < world.size; ++rank) numbers.push_back(rank);
  Experts whole(numbers), mine(std::vector<int>{world.rank});
  const auto x = torch::ones({2, 3}, torch::kDouble);
  torch::optim::SGD whole_sgd(whole->parameters(), 0.1);
  torch::optim::SGD sgd(mine->parameters(), 0.1);
  GradScaler scaler({.init_scale = 4}), whole_scaler({.init_scale = 4});
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    whole_sgd.zero_grad();
    scaler.scale(mine(x)).backward();
    for (const auto& one : mine->shared->parameters()) all_reduce(one.grad());
    whole_scaler.scale(whole(x)).backward();
    if (step == 2) {  // in one expert only
      whole->experts[1]->bias.grad()[0] = INFINITY;
      if (world.rank == 1) mine->experts[0]->bias.grad()[0] = INFINITY;
    }
    scaler.unscale_(sgd);
    whole_scaler.unscale_(whole_sgd);
    const auto norm = clip_grad_norm_(sgd, 0.5).item<double>();
    const auto want = clip_grad_norm_(whole_sgd, 0.5).item<double>();
    if (step != 2) {
      EXPECT_NEAR(norm, want, 1e-10);
    }
    scaler.step(sgd);
    whole_scaler.step(whole_sgd);
    EXPECT_EQ(scaler.found_inf(sgd), step == 2);
    scaler.update();
    whole_scaler.update();
    EXPECT_EQ(scaler.get_scale(), whole_scaler.get_scale());
  }
  const std::string folder = (world.folder / "experts").string() + "/";
  TrainingState state{.model = mine.ptr(), .optimizer = &sgd};
  save_snapshot(folder, state);
  verify_replicated(*mine, group.get());
  Experts loaded(numbers);
  torch::optim::SGD loaded_sgd(loaded->parameters(), 0.1);
  TrainingState all{.model = loaded.ptr(), .optimizer = &loaded_sgd};
  EXPECT_TRUE(load_snapshot(folder, all));
  expect_close_parameters(*loaded, *whole, 1e-10, "loaded",
                          [](const at::Tensor& one) { return one; });

  Experts confused(std::vector<int>{world.rank}, /*same_name=*/true);
  torch::optim::SGD confused_sgd(confused->parameters(), 0.1);
  TrainingState wrong{.model = confused.ptr(), .optimizer = &confused_sgd};
  const auto refusal = HasSubstr("\"expert.bias\" on rank 0 and on rank 1");
  EXPECT_THAT(message_of([&] { save_snapshot(folder, wrong); }), refusal);
  EXPECT_THAT(message_of([&] { full_state_dict(*confused); }), refusal);
}

WORLD_TEST(Placement, MistakesAreNamed, 2) {
  auto group = init_process_group();
  const auto tensor = torch::ones({4, 3});
  const auto refusal = [&](const lockstep::Placement& placement) {
    return message_of([&] { set_placement(tensor, placement); });
  };
  EXPECT_THAT(
      refusal(lockstep::Shard{.dim = 2}),
      HasSubstr("Shard::dim is 2, but the tensor has the shape [4, 3]"));
  const auto uneven = refusal(lockstep::Shard{.dim = 0, .size = 7});
  EXPECT_EQ(uneven.empty(), world.rank == 0) << uneven;
  if (world.rank == 1) {
    EXPECT_THAT(uneven, HasSubstr("its part is [3, 3]"));
  }
  set_placement(tensor, lockstep::Shard{.dim = 1});
  ASSERT_NE(layout_of(tensor), nullptr);
  EXPECT_EQ(layout_of(tensor)->shape, (Sizes{4, 6}));
  set_placement(tensor, lockstep::Replicate{});
  EXPECT_EQ(layout_of(tensor), nullptr);

  // An average over ranks that have different parts.
  const Pair pair(group.get());
  EXPECT_THAT(message_of([&] { DistributedDataParallel<Pair> model(pair); }),
              HasSubstr("have different parts of 'up'"));
  DistributedDataParallel<Pair> alone(
      pair, {.process_group = split_group({{0}, {1}})});
}

// Experts of equal shapes. A sharded optimizer gathered pieces of different
// experts into one, an averager averaged them, and after a join every rank had
// the moments of one of them.
WORLD_TEST(Placement, WhatTakesReplicasRefusesParts, 2) {
  auto group = init_process_group();
  Experts mine(std::vector<int>{world.rank});
  for (const auto& one : mine->parameters()) {
    one.mutable_grad() = torch::ones_like(one);
  }
  const auto before = mine->experts[0]->weight.clone();
  const auto refused =
      HasSubstr("have different parts of the tensor of [3, 3]");
  EXPECT_THAT(message_of([&] {
                ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
                    mine->parameters(), torch::optim::SGDOptions(0.1));
              }),
              refused);
  PeriodicModelAverager averager({.period = 1});
  EXPECT_THAT(
      message_of([&] { averager.average_parameters(mine->parameters()); }),
      refused);
  torch::optim::SGD sgd(mine->parameters(), 0.1);
  EXPECT_THAT(message_of([&] { JoinedOptimizer joined(sgd); }), refused);
  EXPECT_TRUE(mine->experts[0]->weight.equal(before));
  // All of them take what the ranks have in common.
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
      mine->shared->parameters(), torch::optim::SGDOptions(0.1));
  averager.average_parameters(mine->shared->parameters());
}

// A buffer of which each rank has its own.
struct CountsImpl : torch::nn::Module {
  explicit CountsImpl(int rank)
      : shared(register_module("shared", torch::nn::Linear(3, 3))),
        counts(register_buffer("counts", torch::full({2 + rank}, 1. * rank))),
        seen(register_buffer("seen", torch::full({2}, 1. * rank))) {
    set_placement(counts, Own{});
  }
  at::Tensor forward(const at::Tensor& x) { return shared(x); }
  torch::nn::Linear shared;
  at::Tensor counts, seen;
};
TORCH_MODULE(Counts);

// Every rank got the buffer of rank 0.
WORLD_TEST(Placement, BuffersOfWhichRanksHavePartsStayAsTheyAre, 2) {
  auto group = init_process_group();
  const auto expect_own = [&](const Counts& module) {
    EXPECT_TRUE(
        module->counts.equal(torch::full({2 + world.rank}, 1. * world.rank)));
    EXPECT_TRUE(module->seen.equal(torch::zeros({2})));
  };
  Counts averaged(world.rank);
  DistributedDataParallel<Counts> model(averaged);
  model(torch::ones({1, 3})).sum().backward();
  model(torch::ones({1, 3})).sum().backward();
  expect_own(averaged);
  Counts divided(world.rank);
  FullyShard<Counts> unit(divided);
  expect_own(divided);
}

}  // namespace
}  // namespace lockstep::internal::testing
