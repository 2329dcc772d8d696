// The state of optimizers that every rank keeps whole, after the ranks made
// different numbers of steps.

#include "lockstep/parallel/join/joined_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;

using LinearModel = DistributedDataParallel<torch::nn::Linear>;

void step_on(LinearModel& model, torch::optim::Optimizer& optimizer, double x) {
  optimizer.zero_grad();
  model(torch::full({2, 5}, x)).square().mean().backward();
  optimizer.step();
}

// Returns the largest difference of `tensor` between this rank and rank 0.
double difference(const at::Tensor& tensor) {
  at::Tensor first = tensor.detach().clone();
  broadcast(first, 0);
  return (first - tensor.detach()).abs().max().item<double>();
}

// Rank 0 takes 4 steps, rank 1 takes 3, the last rank none.
int steps_of(int rank, int size) { return rank + 1 == size ? 0 : 4 - rank; }

// Trains unevenly under join(), then evenly without it; returns whether every
// rank then has the same parameters, bit by bit.
template <class Make>
bool replicas_agree(const Make& make, int rank, int size, bool joined) {
  torch::nn::Linear net(5, 3);
  LinearModel model(net);
  const auto optimizer = make(net->parameters());
  JoinedOptimizer moments(*optimizer);
  std::vector<Joinable*> joinables{&model.joinable()};
  if (joined) joinables.push_back(&moments);
  for (int epoch = 0; epoch < 2; ++epoch) {
    join(joinables, [&] {
      for (int step = 0; step < steps_of(rank, size); ++step) {
        step_on(model, *optimizer, 0.3 * (rank + step + 1));
      }
    });
  }
  for (int step = 0; step < 3; ++step) {
    step_on(model, *optimizer, 0.1 * (rank + step + 1));
  }
  return difference(net->weight) + difference(net->bias) == 0;
}

template <class Optimizer, class Options>
void expect_kept_alike(const Options& options, int rank, int size) {
  const auto make = [&](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
  EXPECT_TRUE(replicas_agree(make, rank, size, true));
  // Without JoinedOptimizer the replicas drift, which it must prevent.
  const at::Tensor agree =
      torch::tensor({replicas_agree(make, rank, size, false) ? 1.0 : 0.0});
  all_reduce(agree);
  EXPECT_LT(agree.item<double>(), size);
}

WORLD_TEST(JoinedOptimizer, GivesAllRanksTheMomentsOfTheOneThatTrainedLongest,
           2, 3) {
  on_both_backends([&] {
    const int r = world.rank, n = world.size;
    expect_kept_alike<torch::optim::SGD>(
        torch::optim::SGDOptions(0.1).momentum(0.9), r, n);
    expect_kept_alike<torch::optim::Adam>(
        torch::optim::AdamOptions(0.01).amsgrad(true), r, n);
    expect_kept_alike<torch::optim::RMSprop>(
        torch::optim::RMSpropOptions(0.01).centered(true), r, n);
    expect_kept_alike<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1),
                                             r, n);
    expect_kept_alike<optim::SGD>(optim::SGDOptions{.lr = 0.1, .momentum = 0.9},
                                  r, n);
    expect_kept_alike<optim::AdamW>(optim::AdamWOptions{.lr = 0.01}, r, n);
  });
}

WORLD_TEST(JoinedOptimizer, LeavesTheLongestRankAsItIs, 2) {
  auto group = init_process_group();
  torch::nn::Linear net(5, 3);
  LinearModel model(net);
  optim::Adam optimizer(net->parameters(), {.lr = 0.01});
  JoinedOptimizer moments(optimizer);
  join({&model.joinable(), &moments}, [&] {
    for (int step = 0; step < 2 + world.rank; ++step) {
      step_on(model, optimizer, 1.0);
    }
    // The rate of a scheduler is sent, too.
    optimizer.param_groups()[0].options().set_lr(0.5 + world.rank);
  });
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1.5);
  const auto state = state_dict(optimizer);
  ASSERT_EQ(state.state.size(), 2);
  for (const auto& [number, values] : state.state) {
    EXPECT_EQ(std::get<at::Tensor>(values.at("step")).item<double>(), 3);
  }
}

// A save refuses optimizers that have stepped unevenly, and advises this class.
WORLD_TEST(JoinedOptimizer, ASaveAdvisesItAndThenSucceeds, 2) {
  auto group = init_process_group();
  const std::string path = (world.folder / "uneven/").string();
  for (const bool joined : {false, true}) {
    torch::manual_seed(1);
    torch::nn::Linear net(5, 3);
    LinearModel model(net);
    optim::Adam optimizer(net->parameters(), {.lr = 0.01});
    JoinedOptimizer moments(optimizer);
    std::vector<Joinable*> joinables{&model.joinable()};
    if (joined) joinables.push_back(&moments);
    join(joinables, [&] {
      for (int step = 0; step < 2 + world.rank; ++step) {
        step_on(model, optimizer, 1.0);
      }
    });
    const TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    if (joined) {
      save_snapshot(path, state);
      continue;
    }
    EXPECT_THAT([&] { save_snapshot(path, state); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(
                    "the optimizer of rank 1 has other hyperparameters or step "
                    "counts than that of rank 0; ranks that save together must "
                    "have stepped alike (after uneven inputs, a "
                    "JoinedOptimizer makes them equal)")));
  }
  const auto saved = load_snapshot_file(path);
  for (const auto& [number, values] : saved.optimizer_state->state) {
    EXPECT_EQ(std::get<at::Tensor>(values.at("step")).item<double>(), 3);
  }
}

// Groups without state have nothing to send, and the moments of 0-dimensional
// parameters have no dimensions.
WORLD_TEST(JoinedOptimizer, TakesGroupsWithoutStateAndScalars, 2) {
  auto group = init_process_group();
  auto frozen = torch::ones({2});
  auto scalar = torch::tensor(1.0).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{frozen});
  groups.emplace_back(std::vector<at::Tensor>{scalar});
  torch::optim::Adam optimizer(groups, torch::optim::AdamOptions(0.1));
  scalar.mutable_grad() = torch::tensor(world.rank + 1.0).to(torch::kFloat);
  for (int step = 0; step <= world.rank; ++step) optimizer.step();
  JoinedOptimizer moments(optimizer);
  moments.after_join(1);
  auto& state = static_cast<torch::optim::AdamParamState&>(
      *optimizer.state().at(scalar.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 2);
  EXPECT_EQ(difference(state.exp_avg()), 0);
  EXPECT_EQ(optimizer.state().size(), 1);
}

WORLD_TEST(JoinedOptimizer, RefusesWhatItCannotSend, 1) {
  auto group = init_process_group();
  torch::nn::Linear net(5, 3);
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THAT([&] { JoinedOptimizer{lbfgs}; },
              ThrowsMessage<std::invalid_argument>(HasSubstr("SGD, Adam")));
  ZeroRedundancyOptimizer<torch::optim::SGD> sharded(
      net->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_THAT([&] { JoinedOptimizer{sharded}; },
              ThrowsMessage<std::invalid_argument>(HasSubstr("itself")));
}

// Moments would go to other parameters. The constructor refuses this, so the
// job does not fail hours later.
WORLD_TEST(JoinedOptimizer, OptimizersThatDifferAreRefusedOnAllRanks, 2, 3) {
  auto group = init_process_group();
  const bool last = world.rank + 1 == world.size;
  auto mine = torch::ones({last ? 3 : 2}).requires_grad_();
  torch::optim::Adam optimizer({mine}, 0.1);
  EXPECT_THAT([&] { JoinedOptimizer{optimizer}; },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr(c10::str("[3] on rank ", world.size - 1))));
}

}  // namespace
}  // namespace lockstep::internal
