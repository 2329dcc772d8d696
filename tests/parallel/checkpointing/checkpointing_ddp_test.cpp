// Checkpointed parts in DistributedDataParallel: gradients bit for bit as
// without checkpointing, over several steps, on shared memory and on Gloo.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using testing::on_both_backends;
using testing::World;

template <typename Module>
torch::Tensor run_part(bool checkpointed, Module& module,
                       const torch::Tensor& x) {
  return checkpointed ? checkpoint(module, x) : module->forward(x);
}

struct DropBlockImpl : torch::nn::Module {
  DropBlockImpl() {
    inner = register_module("inner", torch::nn::Linear(5, 9));
    outer = register_module("outer", torch::nn::Linear(9, 5));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + outer(torch::dropout(inner(x).tanh(), 0.3, true));
  }
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(DropBlock);

struct PartsImpl : torch::nn::Module {
  explicit PartsImpl(bool with_spare) {
    first = register_module("first", torch::nn::Linear(5, 5));
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back();
      register_module("block" + std::to_string(i), blocks.back());
    }
    last = register_module("last", torch::nn::Linear(5, 1));
    if (with_spare) spare = register_module("spare", torch::nn::Linear(2, 2));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& input, bool checkpointed) {
    auto x = first(input);
    for (auto& block : blocks) x = run_part(checkpointed, block, x);
    return last(x);
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, spare{nullptr};
  std::vector<DropBlock> blocks;
};
TORCH_MODULE(Parts);

struct Run {
  DistributedDataParallelOptions options{};
  bool with_spare = false;
  int local_steps = 0;  // under no_sync, before each averaged one
  bool with_comm_hook = false;
  bool steps_in_backward = false;
};

// Trains four steps and returns all losses and gradients. A hook that counts is
// on each parameter.
std::vector<torch::Tensor> train(const Run& run, bool checkpointed,
                                 const World& world) {
  torch::manual_seed(4);
  Parts net(run.with_spare);
  DistributedDataParallel<Parts> model(net, run.options);
  if (run.with_comm_hook) model.register_comm_hook(allreduce_hook());
  std::map<std::string, int> counts;
  for (const auto& item : net->named_parameters()) {
    item.value().register_hook(
        [&count = counts[item.key()]](const torch::Tensor& gradient) {
          ++count;
          return gradient;
        });
  }
  if (run.steps_in_backward) {
    model.apply_optimizer_in_backward([](std::vector<torch::Tensor> given) {
      return std::make_unique<torch::optim::SGD>(std::move(given), 0.1);
    });
  }
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  std::vector<torch::Tensor> all;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int i = 0; i <= run.local_steps; ++i) {
      torch::manual_seed(100 * step + 10 * i + world.rank);
      const auto x = torch::randn({6, 5}, torch::kDouble);
      const std::unique_ptr<NoSync> local(
          i < run.local_steps ? new NoSync(model.no_sync()) : nullptr);
      auto loss = model(x, checkpointed).square().mean();
      for (auto& [name, count] : counts) count = 0;
      loss.backward();
      for (const auto& [name, count] : counts) {
        EXPECT_EQ(count, name.starts_with("spare") ? 0 : 1) << name;
      }
      all.push_back(loss.detach());
    }
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                               : torch::Tensor());
    }
    optimizer.step();
  }
  for (const auto& parameter : net->parameters()) {
    all.push_back(parameter.detach().clone());
  }
  return all;
}

void expect_same_training(const Run& run, const World& world) {
  const auto want = train(run, false, world);
  const auto have = train(run, true, world);
  ASSERT_EQ(have.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(have[i].defined(), want[i].defined()) << i;
    if (!want[i].defined()) continue;
    EXPECT_TRUE(torch::equal(have[i], want[i])) << i;
  }
}

WORLD_TEST(CheckpointingDdp, TrainingIsTheSame, 1, 2) {
  on_both_backends([&] {
    expect_same_training({}, world);
    // A bucket for each parameter.
    expect_same_training({.options = {.bucket_cap_mb = 1e-6}}, world);
    expect_same_training({.options = {.gradient_as_bucket_view = false}},
                         world);
  });
}

WORLD_TEST(CheckpointingDdp, UnusedParametersAndStaticGraph, 1, 2) {
  on_both_backends([&] {
    expect_same_training(
        {.options = {.find_unused_parameters = true}, .with_spare = true},
        world);
    expect_same_training({.options = {.static_graph = true}}, world);
    expect_same_training(
        {.options = {.static_graph = true}, .with_spare = true}, world);
  });
}

WORLD_TEST(CheckpointingDdp, AccumulationHooksAndStepsInBackward, 1, 2) {
  on_both_backends([&] {
    expect_same_training({.local_steps = 2}, world);
    expect_same_training({.with_comm_hook = true}, world);
    expect_same_training({.steps_in_backward = true}, world);
  });
}

WORLD_TEST(CheckpointingDdp, MixedPrecision, 2) {
  on_both_backends([&] {
    expect_same_training(
        {.options = {.mixed_precision =
                         MixedPrecision{.param_dtype = torch::kFloat}}},
        world);
  });
}

}  // namespace
}  // namespace lockstep::internal
