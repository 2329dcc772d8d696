// The state of the sharded optimizer, collected and partitioned again.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/lr_scheduler/cyclic_schedulers.h"
#include "lockstep/optim/lr_scheduler/formula_schedulers.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using Zero = ZeroRedundancyOptimizer<optim::AdamW>;

void expect_same_state(const OptimizerState& a, const OptimizerState& b) {
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [number, values] : b.state) {
    for (const auto& [name, value] : values) {
      const auto& other = a.state.at(number).at(name);
      const auto* tensor = std::get_if<at::Tensor>(&value);
      ASSERT_NE(tensor, nullptr);
      EXPECT_TRUE(std::get<at::Tensor>(other).equal(*tensor))
          << number << " " << name;
    }
  }
  ASSERT_EQ(a.param_groups.size(), b.param_groups.size());
  for (size_t g = 0; g < a.param_groups.size(); ++g) {
    EXPECT_EQ(a.param_groups[g].params, b.param_groups[g].params);
    EXPECT_EQ(std::get<double>(a.param_groups[g].options.at("lr")),
              std::get<double>(b.param_groups[g].options.at("lr")));
  }
}

template <class Optimizer>
void expect_plain_state(const ProcessGroupPtr& group, int to,
                        typename ShardingTraits<Optimizer>::Options options,
                        ZeroRedundancyOptions zero = {}) {
  ZeroNet plain_net, net;
  Optimizer plain(plain_net->parameters(), options);
  ZeroRedundancyOptimizer<Optimizer> sharded(net->parameters(), options, zero);
  averaged_steps(plain_net, plain, 0, 3, group);
  averaged_steps(net, sharded, 0, 3, group);
  sharded.consolidate_state_dict(to);
  EXPECT_EQ(sharded.has_state_dict(), group->rank() == to);
  if (group->rank() == to) {
    expect_same_state(sharded.state_dict(), state_dict(plain));
    expect_same_state(state_dict(*sharded.plain()), state_dict(plain));
  } else {
    EXPECT_THROW(sharded.state_dict(), std::logic_error);
  }
}

WORLD_TEST(ZeroState, IsThatOfTheOptimizerItself, 1, 2, 3) {
  auto group = init_process_group();
  const int last = world.size - 1;
  expect_plain_state<optim::AdamW>(group.get(), 0, {.amsgrad = true});
  expect_plain_state<optim::SGD>(group.get(), last,
                                 {.lr = 0.1, .momentum = 0.9});
  expect_plain_state<optim::SGD>(group.get(), 0, {.lr = 0.1});
  expect_plain_state<torch::optim::Adagrad>(group.get(), last, {});
  expect_plain_state<torch::optim::RMSprop>(
      group.get(), 0, torch::optim::RMSpropOptions(1e-3).momentum(0.9));
  expect_plain_state<optim::AdamW>(group.get(), last, {},
                                   {.cut_parameters = false});
}

// Two ranks save; three load, and one.
WORLD_TEST(ZeroState, SnapshotsKnowNothingOfRanks, 3) {
  auto group = init_process_group();
  const std::string path = world.folder / "zero.pt";
  const auto pair = new_group({0, 1});
  ZeroNet net;
  if (pair) {
    Zero optimizer(net->parameters(), {.lr = 0.02}, {.process_group = pair});
    averaged_steps(net, optimizer, 0, 4, pair);
    optimizer.param_groups()[0].options().set_lr(0.005);
    optimizer.consolidate_state_dict();
    const auto whole = optimizer.plain();
    save_snapshot(path, {.model = net.ptr(), .optimizer = whole.get()},
                  {.group = pair});
  }
  barrier();

  ZeroNet three_net;
  Zero three(three_net->parameters(), {.lr = 7});
  auto whole = three.plain();
  TrainingState state{.model = three_net.ptr(), .optimizer = whole.get()};
  ASSERT_TRUE(load_snapshot(path, state));
  three.load_state_dict(*whole);
  EXPECT_EQ(three.param_groups()[0].options().get_lr(), 0.005);

  ZeroNet one_net;
  optim::AdamW one(one_net->parameters());
  TrainingState alone{.model = one_net.ptr(), .optimizer = &one};
  ASSERT_TRUE(load_snapshot(path, alone));

  averaged_steps(three_net, three, 4, 8, group.get());
  averaged_steps(one_net, one, 4, 8, group.get());
  EXPECT_TRUE(flat_parameters(*three_net).equal(flat_parameters(*one_net)));

  three.consolidate_state_dict(1);
  if (world.rank == 1) {
    expect_same_state(three.state_dict(), state_dict(one));
  }
}

// Schedulers set the rates and momenta of the outer groups; a snapshot in the
// middle has the unsharded optimizer and the scheduler.
template <class Optimizer>
void expect_scheduled_alike(const ProcessGroupPtr& group,
                            const std::string& path) {
  const auto schedule = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<optim::OneCycleLR>(
        optimizer, optim::OneCycleLROptions{.max_lr = 0.05, .total_steps = 10});
  };
  const auto steps = [&](const ZeroNet& net, torch::optim::Optimizer& optimizer,
                         optim::LRScheduler& scheduler, int from, int to) {
    for (int step = from; step < to; ++step) {
      averaged_steps(net, optimizer, step, step + 1, group);
      scheduler.step();
    }
  };
  ZeroNet plain_net, net, resumed_net;
  Optimizer plain(plain_net->parameters());
  ZeroRedundancyOptimizer<Optimizer> sharded(net->parameters());
  const auto plain_schedule = schedule(plain);
  const auto sharded_schedule = schedule(sharded);
  steps(plain_net, plain, *plain_schedule, 0, 10);
  steps(net, sharded, *sharded_schedule, 0, 4);
  sharded.consolidate_state_dict();
  const auto saved = sharded.plain();
  save_snapshot(path, {.model = net.ptr(),
                       .optimizer = saved.get(),
                       .scheduler = sharded_schedule.get()});

  ZeroRedundancyOptimizer<Optimizer> resumed(resumed_net->parameters());
  const auto resumed_schedule = schedule(resumed);
  const auto whole = resumed.plain();
  TrainingState state{.model = resumed_net.ptr(),
                      .optimizer = whole.get(),
                      .scheduler = resumed_schedule.get()};
  ASSERT_TRUE(load_snapshot(path, state));
  resumed.load_state_dict(*whole);
  EXPECT_EQ(resumed_schedule->last_epoch(), 4);
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(),
            sharded.param_groups()[0].options().get_lr());
  steps(net, sharded, *sharded_schedule, 4, 10);
  steps(resumed_net, resumed, *resumed_schedule, 4, 10);
  const at::Tensor expected = flat_parameters(*plain_net);
  EXPECT_TRUE(flat_parameters(*net).equal(expected));
  EXPECT_TRUE(flat_parameters(*resumed_net).equal(expected));
}

WORLD_TEST(ZeroState, SchedulersAndTheirSnapshotsAreThoseOfOneOptimizer, 1, 2,
           3) {
  auto group = init_process_group();
  expect_scheduled_alike<optim::SGD>(group.get(), world.folder / "sgd.pt");
  expect_scheduled_alike<optim::AdamW>(group.get(),
                                       world.folder / "adamw.safetensors");
}

WORLD_TEST(ZeroState, TheLinearScalingRuleTakesTheWorldSize, 1, 2) {
  auto group = init_process_group();
  ZeroNet net;
  Zero optimizer(net->parameters(), {.lr = 0.01});
  const auto warmup = optim::scale_lr_linearly(optimizer, {.warmup_iters = 5});
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01 * world.size);
  EXPECT_EQ(warmup.start_factor, 1.0 / world.size);
}

WORLD_TEST(ZeroState, StateOfAnotherModelIsRefusedAndNothingChanged, 2) {
  auto group = init_process_group();
  ZeroNet net;
  Zero optimizer(net->parameters());
  averaged_steps(net, optimizer, 0, 1, group.get());
  optim::AdamW other(net->first->parameters());
  EXPECT_THROW(optimizer.load_state_dict(other), std::invalid_argument);
  EXPECT_FALSE(optimizer.local_optimizer().state().empty());
}

// Three layers of one shape, registered in the given order.
using Order = std::vector<std::string>;
struct ProjectionsImpl : torch::nn::Module {
  explicit ProjectionsImpl(const Order& order) {
    const auto options = torch::nn::LinearOptions(96, 96).bias(false);
    for (const std::string& name : order) {
      layers.emplace(name, register_module(name, torch::nn::Linear(options)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const char* name : {"q", "k", "v"}) {
      x = layers.at(name)->forward(x).tanh();
    }
    return x;
  }
  std::map<std::string, torch::nn::Linear> layers;
};
TORCH_MODULE(Projections);

using Moments = std::map<std::string, at::Tensor>;

// Returns the first moments by the parameters' names, on every rank.
Moments moments_of(Zero& optimizer, const torch::nn::Module& module) {
  Moments moments;
  for (int rank = 0; rank < get_world_size(); ++rank) {
    optimizer.consolidate_state_dict(rank);
    if (rank != get_rank()) continue;
    const OptimizerState state = state_dict(*optimizer.plain(), module);
    for (const auto& group : state.param_groups) {
      for (size_t i = 0; i < group.params.size(); ++i) {
        moments[group.param_names[i]] =
            std::get<at::Tensor>(state.state.at(group.params[i]).at("exp_avg"));
      }
    }
  }
  return moments;
}

void expect_same_moments(const Moments& actual, const Moments& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, moment] : expected) {
    EXPECT_TRUE(actual.at(name).equal(moment)) << name;
  }
}

// The moments of q went to k, which the new model has first.
WORLD_TEST(ZeroState, IsLoadedByNamesAndNotByPosition, 1, 2) {
  const auto group = init_process_group();
  torch::manual_seed(1);
  Projections saved(Order{"q", "k", "v"});
  DistributedDataParallel<Projections> wrapper(saved);
  Zero optimizer(wrapper);
  wrapper(torch::randn({4, 96})).square().mean().backward();
  optimizer.step();
  const Moments expected = moments_of(optimizer, *saved);
  ASSERT_FALSE(expected.at("q.weight").equal(expected.at("k.weight")));
  OptimizerState state;
  for (int rank = 0; rank < world.size; ++rank) {
    optimizer.consolidate_state_dict(rank);
    if (rank == world.rank) state = optimizer.state_dict();
  }
  ASSERT_EQ(state.param_groups[0].param_names,
            (std::vector<std::string>{"q.weight", "k.weight", "v.weight"}));

  Projections other(Order{"k", "v", "q"});
  DistributedDataParallel<Projections> other_wrapper(other);
  Zero by_wrapper(other_wrapper);
  by_wrapper.load_state_dict(state);
  expect_same_moments(moments_of(by_wrapper, *other), expected);

  Projections third(Order{"v", "k", "q"});
  Zero by_module(third->parameters());
  by_module.load_state_dict(state, *third);
  expect_same_moments(moments_of(by_module, *third), expected);

  OptimizerState numbered = state;
  numbered.param_groups[0].param_names.clear();
  EXPECT_THAT(message_of([&] { by_module.load_state_dict(numbered, *third); }),
              HasSubstr("has numbers instead of the parameters' names"));
  OptimizerState foreign = state;
  foreign.param_groups[0].param_names[1] = "o.weight";
  EXPECT_THAT(message_of([&] { by_wrapper.load_state_dict(foreign); }),
              HasSubstr("its group 0 lacks k.weight"));
  // An optimizer over the same parameters, in another order.
  auto reversed = third->parameters();
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_THAT(
      message_of([&] { by_module.load_state_dict(optim::AdamW(reversed)); }),
      HasSubstr("the same parameters in another order"));
  expect_same_moments(moments_of(by_module, *third), expected);
}

// Tests the recommendation of the error of torch::load().
WORLD_TEST(ZeroState, ArchivesAreLoadedThroughThePlainOptimizer, 2) {
  const auto group = init_process_group();
  ZeroNet plain_net, net;
  optim::AdamW plain(plain_net->parameters(), {.lr = 0.02});
  averaged_steps(plain_net, plain, 0, 3, group);
  std::stringstream archive;
  torch::save(plain, archive);
  Zero optimizer(net->parameters());
  EXPECT_THAT(message_of([&] { torch::load(optimizer, archive); }),
              HasSubstr("load it into plain()"));
  archive.clear();
  archive.seekg(0);
  const auto whole = optimizer.plain();
  torch::load(*whole, archive);
  optimizer.load_state_dict(*whole);
  optimizer.consolidate_state_dict(1);
  if (world.rank == 1) {
    expect_same_state(optimizer.state_dict(), state_dict(plain));
  }
}

// Every snapshot had False.
WORLD_TEST(ZeroState, HoldsMaximize, 2) {
  auto group = init_process_group();
  ZeroNet net;
  Zero up(net->parameters(), {.maximize = true});
  Zero down(net->parameters());
  up.consolidate_state_dict(0);
  if (world.rank != 0) return;
  const OptimizerState& state = up.state_dict();
  EXPECT_TRUE(std::get<bool>(state.param_groups[0].options.at("maximize")));
  EXPECT_THROW(down.load_state_dict(state), std::invalid_argument);
  up.load_state_dict(OptimizerState(state));
}

}  // namespace
}  // namespace lockstep::internal
