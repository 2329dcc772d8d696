// DistributedDataParallel whose groups are made again during the training.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/worker/healing_place.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using torch::nn::Sequential;
using Ddp = DistributedDataParallel<Sequential>;

constexpr int64_t kFeatures = 160;  // a weight's gradient may be moved

class JobThatHeals {
 public:
  JobThatHeals() { ::setenv(kHealVariable, "1", 1); }
  ~JobThatHeals() { ::unsetenv(kHealVariable); }
  JobThatHeals(const JobThatHeals&) = delete;
  JobThatHeals& operator=(const JobThatHeals&) = delete;
};

struct Case {
  const char* backend;
  DistributedDataParallelOptions options{};
  bool freezes = false;  // a layer, in every other step
  bool steps_in_backward = false;
};

// Trains for six steps and returns the parameters and buffers. If `again`, a
// step in the midst fails on one rank, the groups are made again, and the step
// is repeated.
std::vector<at::Tensor> trained(const Case& with, const World& world,
                                bool again) {
  auto group = init_process_group(with.backend);
  const auto part = new_group();
  torch::manual_seed(3);
  Sequential net(Linear(kFeatures, kFeatures), BatchNorm1d(kFeatures),
                 Linear(kFeatures, kFeatures), torch::nn::ReLU(),
                 Linear(kFeatures, 4));
  auto options = with.options;
  options.process_group = part;
  Ddp model(net, options);
  const auto momentum = torch::optim::SGDOptions(0.01).momentum(0.9);
  torch::optim::SGD optimizer(net->parameters(), momentum);
  if (with.steps_in_backward) {
    model->apply_optimizer_in_backward([&](std::vector<at::Tensor> of) {
      return std::make_unique<torch::optim::SGD>(std::move(of), momentum);
    });
  }
  const auto backward = [&](int step) {
    if (with.freezes) net[2]->as<Linear>()->weight.set_requires_grad(step % 2);
    torch::manual_seed(100 * step + world.rank);
    const auto batch = torch::randn({8, kFeatures});
    optimizer.zero_grad();
    model->forward(batch).square().sum().backward();
  };
  for (int step = 0; step < 6; ++step) {
    if (again && step == 3) {
      // Rank 0 is in the midst of a backward that the others do not make.
      if (world.rank == 0 && world.size > 1 && !with.steps_in_backward) {
        const auto ones = at::ones({1});
        EXPECT_THROW(
            all_reduce(ones, {.group = part,
                              .timeout = std::chrono::milliseconds(100)}),
            c10::DistError);
      }
      reconfigure({.uuid = "again"});
      run_reconfigured();
    }
    backward(step);
    if (!with.steps_in_backward) optimizer.step();
  }
  std::vector<at::Tensor> all;
  for (const auto& tensor : net->parameters()) all.push_back(tensor.detach());
  for (const auto& tensor : net->buffers()) all.push_back(tensor);
  return all;
}

void expect_same_bits(const Case& with, const World& world) {
  const JobThatHeals job;
  const auto plain = trained(with, world, /*again=*/false);
  const auto repeated = trained(with, world, /*again=*/true);
  ASSERT_EQ(plain.size(), repeated.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::equal(plain[i], repeated[i]))
        << with.backend << ", tensor " << i;
  }
}

WORLD_TEST(DdpReconfigure, GoesOnWithTheSameBits, 1, 2, 3) {
  for (const char* backend : {"lockstep", "gloo"}) {
    expect_same_bits({.backend = backend}, world);
    expect_same_bits({.backend = backend, .options = {.bucket_cap_mb = 0.1}},
                     world);
  }
}

WORLD_TEST(DdpReconfigure, WithEveryWayOfReducing, 2) {
  for (const char* backend : {"lockstep", "gloo"}) {
    expect_same_bits({.backend = backend, .freezes = true}, world);
    expect_same_bits({.backend = backend, .steps_in_backward = true}, world);
    expect_same_bits(
        {.backend = backend, .options = {.find_unused_parameters = true}},
        world);
    expect_same_bits({.backend = backend, .options = {.static_graph = true}},
                     world);
    expect_same_bits(
        {.backend = backend,
         .options = {.mixed_precision =
                         MixedPrecision{.param_dtype = at::kBFloat16,
                                        .buffer_dtype = at::kBFloat16}}},
        world);
  }
}

}  // namespace
}  // namespace lockstep::internal
