// Parameters on GPUs are averaged after the step that has changed them, and
// before the next one reads them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/parallel/model_averaging/averagers.h"
#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

void expect_averaging_as_on_cpu(
    const World& world,
    const std::function<std::shared_ptr<ModelAverager>()>& make) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        ZeroNet net(torch::kDouble);
        net->to(device);
        PostLocalSGDOptimizer optimizer(
            std::make_shared<torch::optim::SGD>(net->parameters(), 0.1),
            make());
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          zero_loss(
              net->forward(
                  zero_batch(step, world.rank, torch::kDouble).to(device)))
              .backward();
          optimizer.step();
        }
        return std::vector<at::Tensor>{flat_parameters(*net)};
      },
      1e-12);
}

WORLD_TEST(SimgpuModelAveraging, PeriodicIsAsOnTheCpu, 2, 3) {
  expect_averaging_as_on_cpu(world, [] {
    return std::make_shared<PeriodicModelAverager>(
        PeriodicModelAveragerOptions{.period = 2});
  });
}

WORLD_TEST(SimgpuModelAveraging, HierarchicalIsAsOnTheCpu, 4) {
  expect_averaging_as_on_cpu(world, [] {
    return std::make_shared<HierarchicalModelAverager>(
        HierarchicalModelAveragerOptions{
            .period_group_size_dict = {{1, 2}, {2, 4}}});
  });
}

}  // namespace
}  // namespace lockstep::internal::testing
