// Parallel equals single in worlds that are not one group on one host: two
// hosts, with gradients larger than any size at which their sum is cut into
// parts; and groups that are a part of the world.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/rank_averages.h"

namespace lockstep::internal::testing {
namespace {

using Wrapped = DistributedDataParallel<torch::nn::Sequential>;
using Adam = torch::optim::Adam;
using AdamOptions = torch::optim::AdamOptions;
using ShardedAdam = ZeroRedundancyOptimizer<Adam>;

constexpr int kSteps = 2;

torch::nn::Sequential net_of_width(int64_t width) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(kIn, width), torch::nn::Tanh(),
                            torch::nn::Linear(width, width), torch::nn::Tanh(),
                            torch::nn::Linear(width, 2));
  net->to(torch::kDouble);
  return net;
}

// The gradients have 17 MB in double.
torch::nn::Sequential large_net() { return net_of_width(1450); }

AdamOptions adam_options() { return AdamOptions(1e-3).eps(1e-4); }

// Trains in one process with the rows of all ranks.
torch::nn::Sequential trained_alone(torch::nn::Sequential net, int size) {
  const auto parameters = net->parameters();
  Adam optimizer(parameters, adam_options());
  for (int step = 0; step < kSteps; ++step) {
    const auto mean = averages(size, parameters, loss_of(net, step));
    for (size_t i = 0; i < mean.size(); ++i) {
      auto parameter = parameters[i];
      parameter.mutable_grad() = mean[i];
    }
    optimizer.step();
  }
  return net;
}

void expect_same_parameters(const torch::nn::Sequential& have,
                            const torch::nn::Sequential& want) {
  const auto wanted = want->parameters();
  const auto had = have->parameters();
  for (size_t i = 0; i < wanted.size(); ++i) {
    // Only the order of summation differs.
    EXPECT_LT((wanted[i] - had[i]).abs().max().item<double>(), 1e-12)
        << "parameter " << i;
  }
}

void train(Wrapped& model, torch::optim::Optimizer& optimizer, int rank) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    model(rows(rank, step)).square().sum().backward();
    optimizer.step();
  }
}

// Trains one net with each optimizer over `group`, and compares it with one
// process that has the rows of all its ranks.
void expect_training_equals_single(const ProcessGroupPtr& group,
                                   torch::nn::Sequential (*make)()) {
  const auto single = trained_alone(make(), group->size());
  {
    SCOPED_TRACE("DistributedDataParallel");
    auto net = make();
    Wrapped model(net, {.process_group = group});
    Adam optimizer(net->parameters(), adam_options());
    train(model, optimizer, group->rank());
    expect_same_parameters(net, single);
  }
  {
    SCOPED_TRACE("ZeroRedundancyOptimizer");
    auto net = make();
    Wrapped model(net, {.process_group = group});
    ShardedAdam optimizer(model, adam_options());
    train(model, optimizer, group->rank());
    expect_same_parameters(net, single);
  }
}

// The second host begins with rank `size` / 2.
void be_on_one_of_two_hosts(const World& world) {
  ::setenv("LOCKSTEP_HOST_ID", world.rank < (world.size + 1) / 2 ? "a" : "b",
           /*overwrite=*/1);
}

WORLD_TEST(TwoHosts, GradientsOf17MegabytesAreThoseOfOneProcess, 3) {
  be_on_one_of_two_hosts(world);
  auto group = init_process_group("cpu:lockstep");
  expect_training_equals_single(default_group(), large_net);
}

WORLD_TEST(Subgroups, TrainAsOneProcessWouldWithTheirRowsAlone, 3, 5) {
  for (const char* backend : {"lockstep", "gloo"}) {
    SCOPED_TRACE(backend);
    auto guard = init_process_group(backend);
    // One group lacks the first rank of the world, and neither has consecutive
    // ranks.
    std::vector<int> even, odd;
    for (int rank = 0; rank < world.size; ++rank) {
      (rank % 2 == 0 ? even : odd).push_back(rank);
    }
    const auto even_group = new_group(even);
    const auto odd_group = new_group(odd);
    const auto small = [] { return net_of_width(20); };
    expect_training_equals_single(world.rank % 2 == 0 ? even_group : odd_group,
                                  small);
  }
}

WORLD_TEST(Subgroups, OfTwoHostsTrainAsOneProcess, 5) {
  be_on_one_of_two_hosts(world);
  auto guard = init_process_group("cpu:lockstep");
  const auto members = new_group({1, 2, 3, 4});  // 2 on each host
  if (world.rank != 0) expect_training_equals_single(members, large_net);
  barrier();
}

}  // namespace
}  // namespace lockstep::internal::testing
