// The sharded optimizer on GPUs has the numbers that it has on the CPU.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

using Model = DistributedDataParallel<ZeroNet>;

constexpr int kZeroGpuSteps = 4;

at::Tensor loss_on(auto&& model, int step, int rank, const at::Device& device) {
  return zero_loss(model(zero_batch(step, rank, torch::kDouble).to(device)));
}

template <class Optimizer>
void expect_zero_as_on_cpu(const World& world,
                           typename ShardingTraits<Optimizer>::Options options,
                           const ZeroRedundancyOptions& zero) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        ZeroNet net(torch::kDouble);
        net->to(device);
        Model model(net, {.bucket_cap_mb = 0.06, .first_bucket_mb = 0.002});
        ZeroRedundancyOptimizer<Optimizer> optimizer(model, options, zero);
        for (int step = 0; step < kZeroGpuSteps; ++step) {
          optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
          loss_on(model, step, world.rank, device).backward();
          optimizer.step();
        }
        return std::vector<at::Tensor>{flat_parameters(*net)};
      },
      1e-12);
}

WORLD_TEST(SimgpuZero, TrainsOverDdpAsOnTheCpu, 2, 3) {
  expect_zero_as_on_cpu<optim::AdamW>(world, {.lr = 0.01}, {});
  expect_zero_as_on_cpu<optim::AdamW>(world, {.lr = 0.01},
                                      {.step_in_backward = true});
  expect_zero_as_on_cpu<optim::SGD>(world, {.lr = 0.05, .momentum = 0.9},
                                    {.cut_parameters = false});
  expect_zero_as_on_cpu<torch::optim::Adam>(world, {}, {});
}

WORLD_TEST(SimgpuZero, TrainsOverGradientsOfOthersAsOnTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        ZeroNet net(torch::kDouble);
        net->to(device);
        ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters(),
                                                        {.lr = 0.01});
        for (int step = 0; step < kZeroGpuSteps; ++step) {
          optimizer.zero_grad();
          loss_on([&](const at::Tensor& x) { return net->forward(x); }, step,
                  world.rank, device)
              .backward();
          for (const auto& parameter : net->parameters()) {
            all_reduce(parameter.grad(), {.op = ReduceOp::AVG});
          }
          optimizer.step();
        }
        return std::vector<at::Tensor>{flat_parameters(*net)};
      },
      1e-12);
}

WORLD_TEST(SimgpuZero, SharedParametersAreForTheCpu, 2) {
  with_delays([&](const at::Device& device) {
    ZeroNet net;
    net->to(device);
    Model model(net);
    EXPECT_THAT(message_of([&] {
                  ZeroRedundancyOptimizer<optim::AdamW> optimizer(
                      model, {}, {.shared_parameters = true});
                }),
                ::testing::HasSubstr("use shared_parameters = false"));
  });
}

}  // namespace
}  // namespace lockstep::internal::testing
