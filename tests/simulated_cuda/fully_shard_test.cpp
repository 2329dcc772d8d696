// FullyShard on GPUs has the numbers that it has on the CPU: units are gathered
// ahead, by hand or not at all, and divided over two axes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kShardSteps = 3;

struct Way {
  FullyShardOptions options{};
  bool replicas = false;
  bool early = false;     // unshards by hand before forward
  bool no_grad = false;   // evaluates between the steps
  int micro_batches = 1;  // of which all but the last are under no_sync()
  double bound = 1e-12;
};

std::vector<at::Tensor> train(const World& world, Way way,
                              const at::Device& device) {
  if (way.replicas) take_replicas(world, way.options);
  torch::manual_seed(3);
  FullyShard<ShardedNet> model(
      [&] { return ShardedNet(way.options, 3, at::kDouble, device); },
      way.options);
  torch::optim::AdamW optimizer(model->parameters(), adamw());
  std::vector<at::Tensor> results;
  for (int step = 0; step < kShardSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < way.micro_batches; ++micro) {
      model.set_requires_gradient_sync(micro + 1 == way.micro_batches);
      const auto tokens =
          tokens_of(step * way.micro_batches + micro, world.rank).to(device);
      if (way.early) model.module()->blocks.back().unshard(/*async_op=*/true);
      auto loss = loss_of(model(tokens), tokens);
      loss.backward();
      results.push_back(loss.detach());
    }
    optimizer.step();
    if (way.no_grad) {
      const torch::NoGradGuard no_grad;
      results.push_back(model(tokens_of(step, 0).to(device)));
    }
    if (way.early) {
      auto& block = model.module()->blocks.front();
      block.unshard();
      results.push_back(block.module()->up->weight.detach() * 2);
      block.reshard();
    }
  }
  for (auto& value : values_of(model->parameters())) {
    results.push_back(std::move(value));
  }
  return results;
}

void expect_fsdp_as_on_cpu(const World& world, const Way& way) {
  expect_as_on_cpu(
      [&](const at::Device& device) { return train(world, way, device); },
      way.bound);
}

WORLD_TEST(SimgpuFullyShard, TrainsAsOnTheCpu, 2, 3) {
  expect_fsdp_as_on_cpu(world, {.no_grad = true});
  expect_fsdp_as_on_cpu(world, {.options = {.reshard_after_forward = false}});
  expect_fsdp_as_on_cpu(world, {.options = {.reshard_after_forward = true},
                                .early = true,
                                .no_grad = true});
}

WORLD_TEST(SimgpuFullyShard, AccumulatesAsOnTheCpu, 2, 3) {
  expect_fsdp_as_on_cpu(world, {.micro_batches = 2});
}

WORLD_TEST(SimgpuFullyShard, KeepsAPartAfterForward, 4) {
  expect_fsdp_as_on_cpu(world, {.options = {.reshard_after_forward = 2}});
}

WORLD_TEST(SimgpuFullyShard, DividesOverTwoAxes, 4) {
  expect_fsdp_as_on_cpu(world, {.replicas = true, .micro_batches = 2});
}

WORLD_TEST(SimgpuFullyShard, CastsAsOnTheCpu, 2, 3) {
  expect_fsdp_as_on_cpu(
      world, {.options = {.mp_policy = {.param_dtype = at::kFloat,
                                        .reduce_dtype = at::kDouble}},
              .micro_batches = 2,
              .bound = 1e-5});
}

}  // namespace
}  // namespace lockstep::internal::testing
