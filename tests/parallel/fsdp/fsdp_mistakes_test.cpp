// Tests what a program may do wrong with FullyShard, and what it is told; and
// how training goes on after an exception.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/placement.h"
#include "lockstep/parallel/fsdp/unit_order.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using torch::nn::Linear;

WORLD_TEST(FsdpMistakes, AStepBetweenForwardAndBackward, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    nets.plain_step(0, world.size);
    nets.step(0, world.rank);
    const auto tokens = tokens_of(1, world.rank);
    const auto loss = loss_of(nets.model(tokens), tokens);
    nets.optimizer.step();
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                HasSubstr("was changed between a forward and its backward"));
    // The step has been made, with the gradients of step 0 again.
    nets.plain_optimizer.step();
    nets.plain_step(1, world.size);
    nets.step(1, world.rank);
    nets.expect_equal(1e-12);
  });
}

WORLD_TEST(FsdpMistakes, AStepBetweenForwardAndBackwardInMixedPrecision, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.mp_policy = {.param_dtype = at::kBFloat16};
    torch::manual_seed(3);
    FullyShard<Linear> model([] { return Linear(3, 5); }, options);
    const auto loss = model(torch::ones({2, 3})).sum();
    {
      const torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) shard.fill_(2);
    }
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                HasSubstr("was changed between a forward and its backward"));
    EXPECT_TRUE(torch::equal(model(torch::ones({2, 3})).to(at::kFloat),
                             torch::full({2, 5}, 8.0)));
  });
}

WORLD_TEST(FsdpMistakes, RequiresGradThatDiffersBetweenRanks, 2, 3, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    const auto freeze = [&](bool frozen) {
      nets.model->named_parameters()["block1.up.weight"].set_requires_grad(
          !frozen);
    };
    nets.step(0, world.rank);
    nets.optimizer.zero_grad();
    if (world.rank == 1) freeze(true);
    const auto tokens = tokens_of(1, world.rank);
    EXPECT_THAT(
        message_of([&] { loss_of(nets.model(tokens), tokens).backward(); }),
        AllOf(HasSubstr("block1"), HasSubstr("requires_grad")));
    if (world.rank == 1) freeze(false);
    for (int step = 0; step < 2; ++step) nets.plain_step(step, world.size);
    nets.step(1, world.rank);
    nets.expect_equal(1e-12);
  });
}

// A bug: in shared memory the gradients of two equal units were averaged with
// each other, in silence.
WORLD_TEST(FsdpMistakes, RanksThatFreezeDifferentUnits, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    const auto freeze = [&](bool frozen) {
      auto& block = nets.model.module()->blocks[world.rank == 0 ? 0 : 1];
      for (auto& shard : block->parameters()) shard.set_requires_grad(!frozen);
    };
    for (int step = 0; step < 2; ++step) {
      freeze(true);
      // In forward before anything was reduced, in backward afterwards.
      EXPECT_THAT(message_of([&] { nets.step(step, world.rank); }),
                  AllOf(HasSubstr("block0"), HasSubstr("block1")));
      freeze(false);
      nets.plain_step(step, world.size);
      nets.step(step, world.rank);
      nets.expect_equal(1e-12);
    }
  });
}

// A bug: the next forward threw, as if the gradients had come from elsewhere.
WORLD_TEST(FsdpMistakes, FreezingDropsWhatNoSyncHasKept, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    {
      const auto guard = nets.model.no_sync();
      nets.backward(0, world.rank);
    }
    for (auto* net : {&nets.model.module()->blocks[1]}) {
      for (auto& shard : (*net)->parameters()) shard.set_requires_grad(false);
    }
    nets.backward(0, world.rank);
    nets.backward(1, world.rank);
    for (const auto& shard : nets.model.module()->blocks[1]->parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
  });
}

WORLD_TEST(FsdpMistakes, AChangeOfUnshardedParameters, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    const auto tokens = tokens_of(0, world.rank);
    const torch::NoGradGuard no_grad;
    nets.model.unshard();
    for (auto& parameter : nets.plain->parameters()) parameter.mul_(0.5);
    for (auto& shard : nets.model->parameters()) shard.mul_(0.5);
    EXPECT_THAT(message_of([&] { nets.model(tokens); }),
                HasSubstr("was changed after a forward"));
    EXPECT_LE(
        (nets.model(tokens) - nets.plain(tokens)).abs().max().item<double>(),
        1e-12);
  });
}

WORLD_TEST(FsdpMistakes, AChangeAfterAForwardThatKeepsItsGraph, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    const auto tokens = tokens_of(0, world.rank);
    auto logits = nets.model(tokens);
    {
      const torch::NoGradGuard no_grad;
      for (auto& shard : nets.model->parameters()) shard.zero_();
    }
    EXPECT_THAT(message_of([&] { nets.model(tokens); }),
                AllOf(HasSubstr("was changed after a forward"),
                      HasSubstr("NoGradGuard")));
    barrier();
  });
}

WORLD_TEST(FsdpMistakes, ACallOfTheModuleInsteadOfTheUnit, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    FullyShard<Linear> model(Linear(3, 5), options);
    const auto x = torch::ones({2, 3});
    if (options.shared_memory && host_sharing(default_group()) != nullptr) {
      const auto past_the_unit = [&] {
        model.module()->forward(x).sum().backward();
      };
      const auto refused = AllOf(
          HasSubstr("parameter weight of the outermost unit got a gradient"),
          HasSubstr("not model.module()->forward(x)"));
      EXPECT_THAT(message_of(past_the_unit), refused);
      model(x).sum().backward();
      // One rank alone goes past the unit, while the other is in forward.
      if (world.rank == 1) {
        EXPECT_THAT(message_of(past_the_unit), HasSubstr("FullyShard"));
      }
      {
        const auto guard = model.no_sync();
        EXPECT_THAT(message_of(past_the_unit), HasSubstr("FullyShard"));
      }
      model(x).sum().backward();
      for (const auto& shard : model->parameters()) {
        EXPECT_TRUE(torch::equal(shard.grad(), torch::full_like(shard, 4)));
      }
    } else {
      EXPECT_THAT(message_of([&] { model.module()->forward(x); }),
                  HasSubstr("only its shard of this parameter at the moment"));
    }
    barrier();
  });
}

struct ListedImpl : torch::nn::Module {
  ListedImpl() {
    register_module("list", torch::nn::ParameterList(torch::ones({3})));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Listed);

struct ReturnsWeightImpl : torch::nn::Module {
  ReturnsWeightImpl() { weight = register_parameter("weight", torch::ones(3)); }
  at::Tensor forward() { return weight; }
  at::Tensor weight;
};
TORCH_MODULE(ReturnsWeight);

struct SharesImpl : torch::nn::Module {
  explicit SharesImpl(const FullyShardOptions& options, bool both_units)
      : first([] { return Linear(3, 3); }, options) {
    register_module("first", first.ptr());
    other = register_module("other",
                            std::make_shared<Holder>(first.module()->weight));
    if (both_units) {
      FullyShard<Holder>(std::dynamic_pointer_cast<Holder>(other), options);
    }
  }
  struct Holder : torch::nn::Module {
    explicit Holder(const at::Tensor& tied) {
      weight = register_parameter("tied", tied);
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
    at::Tensor weight;
  };
  at::Tensor forward(const at::Tensor& x) { return first(x); }
  FullyShard<Linear> first;
  std::shared_ptr<torch::nn::Module> other;
};
TORCH_MODULE(Shares);

WORLD_TEST(FsdpMistakes, ModulesThatCannotBeSharded, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    EXPECT_THAT(message_of([&] { FullyShard<Listed>(Listed(), options); }),
                AllOf(HasSubstr("list.0"), HasSubstr("ParameterList")));
    for (const bool both : {false, true}) {
      EXPECT_THAT(
          message_of(
              [&] { FullyShard<Shares>(Shares(options, both), options); }),
          AllOf(HasSubstr(both ? "parameter tied" : "parameter other.tied"),
                HasSubstr("tied to parameter weight")));
    }
    FullyShard<ReturnsWeight> returns(ReturnsWeight(), options);
    EXPECT_THAT(message_of([&] { returns(); }), HasSubstr("return a clone()"));
    const int64_t outputs = 3 + world.rank;
    EXPECT_THAT(
        message_of([&] { FullyShard<Linear>(Linear(3, outputs), options); }),
        HasSubstr("differ in parameter weight: Float [3, 3] on rank 0, "
                  "Float [4, 3] on rank 1; construct the same module"));
    auto half = options;
    half.mp_policy.param_dtype = at::kInt;
    EXPECT_THAT(message_of([&] { FullyShard<Linear>(Linear(3, 3), half); }),
                HasSubstr("mp_policy.param_dtype is Int"));
    auto replicas = options;
    replicas.replicate_group = default_group();
    EXPECT_THAT(message_of([&] { FullyShard<Linear>(Linear(3, 3), replicas); }),
                HasSubstr("exactly this rank in common"));
    FullyShard<Linear> moved(Linear(3, 3), options);
    moved.module()->to(at::kDouble);
    EXPECT_THAT(message_of([&] { moved(torch::ones({1, 3})); }),
                HasSubstr("has got other memory"));
    using torch::nn::Embedding;
    using torch::nn::EmbeddingOptions;
    FullyShard<Embedding> sparse(Embedding(EmbeddingOptions(5, 2).sparse(true)),
                                 options);
    auto loss = sparse(torch::tensor({1, 2})).sum();
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                HasSubstr("sparse gradient"));
    barrier();
  });
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(const FullyShardOptions& options)
      : inner([] { return Linear(3, 3); }, options) {
    register_module("inner", inner.ptr());
    own = register_module("own", Linear(3, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return own(inner(x)); }
  FullyShard<Linear> inner;
  Linear own{nullptr};
};
TORCH_MODULE(Pair);

// The second unit took the first one's shards for its own.
WORLD_TEST(FsdpMistakes, AModuleThatIsShardedTwice, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    FullyShard<Pair> model([&] { return Pair(options); }, options);
    const auto refused = HasSubstr("is in a unit already");
    EXPECT_THAT(message_of([&] { FullyShard<Pair>(model.ptr(), options); }),
                refused);
    EXPECT_THAT(message_of([&] {
                  FullyShard<Linear>(model.module()->inner.ptr(), options);
                }),
                refused);
    EXPECT_THAT(
        message_of([&] { FullyShard<Linear>(model.module()->own, options); }),
        refused);
    model(torch::ones({2, 3})).sum().backward();
  });
}

// Ranks with other dtypes waited for each other, or took bytes for numbers;
// with init_sync on one rank alone, for the timeout.
WORLD_TEST(FsdpMistakes, OptionsThatDifferBetweenRanks, 2, 3) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    const bool last = world.rank == world.size - 1;
    const auto expect_refused =
        [&](const std::string& name, const std::string& there,
            const std::function<void(FullyShardOptions&)>& change) {
          auto own = options;
          if (last) change(own);
          const auto message =
              message_of([&] { FullyShard<Linear>(Linear(3, 3), own); });
          EXPECT_THAT(message, HasSubstr("differ in option " + name + ": "));
          EXPECT_THAT(message,
                      HasSubstr(c10::str(" on rank 0, ", there, " on rank ",
                                         world.size - 1, "; give")));
        };
    expect_refused("mp_policy.param_dtype", "BFloat16", [](auto& own) {
      own.mp_policy.param_dtype = at::kBFloat16;
    });
    expect_refused("mp_policy.reduce_dtype", "Float",
                   [](auto& own) { own.mp_policy.reduce_dtype = at::kFloat; });
    expect_refused("mp_policy.output_dtype", "Double",
                   [](auto& own) { own.mp_policy.output_dtype = at::kDouble; });
    expect_refused("init_sync", "false",
                   [](auto& own) { own.init_sync = false; });
    expect_refused("shared_memory", options.shared_memory ? "false" : "true",
                   [](auto& own) { own.shared_memory = !own.shared_memory; });
    expect_refused("reshard_after_forward", "false",
                   [](auto& own) { own.reshard_after_forward = false; });
    // Not a number that is allowed, but only one rank would say so.
    expect_refused("reshard_after_forward", "7",
                   [](auto& own) { own.reshard_after_forward = 7; });
    const auto alone = new_subgroups(1);
    expect_refused("replicate_group", "set",
                   [&](auto& own) { own.replicate_group = alone; });
    FullyShard<Linear> works(Linear(3, 3), options);
  });
}

WORLD_TEST(FsdpMistakes, NumbersOfRanksThatDoNotDivideTheGroup, 1, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    const auto refused = [&](int64_t ranks) {
      return HasSubstr("reshard_after_forward is " + std::to_string(ranks) +
                       "; give true, false, or a number of ranks that divides "
                       "the group's size, " +
                       std::to_string(world.size));
    };
    FullyShard<Linear> model(Linear(3, 3), options);
    for (const int64_t ranks : {-2, 0, 3, 8}) {
      if (world.size == 1 && ranks > 0) continue;
      auto wrong = options;
      wrong.reshard_after_forward = ranks;
      EXPECT_THAT(message_of([&] { FullyShard<Linear>(Linear(3, 3), wrong); }),
                  refused(ranks));
      EXPECT_THAT(message_of([&] { model.set_reshard_after_forward(ranks); }),
                  refused(ranks));
    }
    for (const int64_t ranks : {1, 2, 4}) {
      options.reshard_after_forward = ranks;
      FullyShard<Linear> works(Linear(3, 3), options);
      works(torch::ones({2, 3})).sum().backward();
    }
  });
}

// Each rank would step in a direction of its own.
WORLD_TEST(FsdpMistakes, LbfgsOfDividedParameters, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    FullyShard<Linear> model(Linear(3, 3), options);
    torch::optim::LBFGS optimizer(model->parameters());
    model(torch::ones({2, 3})).sum().backward();
    EXPECT_THAT(message_of([&] { clip_grad_norm_(optimizer, 1.0); }),
                world.size == 1 ? ::testing::Matcher<std::string>("")
                                : HasSubstr("LBFGS works on all elements"));
  });
}

WORLD_TEST(FsdpMistakes, TrainingGoesOnAfterAnException, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    if (world.size == 4) options.reshard_after_forward = 2;
    BothNets nets(options);
    for (int step = 0; step < 4; ++step) {
      nets.plain_step(step, world.size);
      // In a forward.
      EXPECT_NE(message_of([&] { nets.model(torch::ones({2})); }), "");
      // In a backward, when the last units have been reduced.
      auto x = nets.model.module()->embedding->weight;
      const auto tokens = tokens_of(step, world.rank);
      const auto loss = loss_of(nets.model(tokens), tokens);
      const auto hook = x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("a hook of the program");
      });
      EXPECT_EQ(message_of([&] { loss.backward(); }), "a hook of the program");
      x.remove_hook(hook);
      nets.step(step, world.rank);
    }
    nets.expect_equal(1e-12);
  });
}

// Before the first unit is reduced, between two, and when the last has been:
// the others do not wait for the deadline, which is far away.
WORLD_TEST(FsdpMistakes, ABackwardThatOneRankGivesUpEndsOnAll, 2, 3) {
  auto group = init_process_group();
  BothNets nets({});
  for (int step = 0; step < 6; ++step) {
    nets.plain_step(step, world.size);
    const auto tokens = tokens_of(step, world.rank);
    auto x = step % 3 == 0   ? nets.model.module()->head->weight
             : step % 3 == 1 ? nets.model.module()->blocks[1].module()->gain
                             : nets.model.module()->embedding->weight;
    const auto loss = loss_of(nets.model(tokens), tokens);
    const int thrower = step % world.size;
    if (world.rank == thrower) {
      const auto hook = x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("a hook of the program");
      });
      EXPECT_EQ(message_of([&] { loss.backward(); }), "a hook of the program");
      x.remove_hook(hook);
    } else {
      EXPECT_THAT(
          message_of([&] { loss.backward(); }),
          HasSubstr("rank " + std::to_string(thrower) + " has given up"));
    }
    nets.step(step, world.rank);
  }
  nets.expect_equal(1e-12);
}

// A rank that gives up its backward because the group is broken says that, and
// not that its peers may go on.
WORLD_TEST(FsdpMistakes, ABrokenGroupIsNotOnlyGivenUp, 2) {
  auto group = init_process_group();
  BothNets nets({});
  nets.step(0, world.rank);
  const auto tokens = tokens_of(1, world.rank);
  const auto said = message_of([&] {
    const auto loss = loss_of(nets.model(tokens), tokens);
    if (world.rank == 1) {
      nets.model.set_requires_gradient_sync(false);
    }
    loss.backward();
  });
  EXPECT_THAT(said, HasSubstr("the ranks wait for each other"));
  EXPECT_THAT(said, Not(HasSubstr("go on with the next forward")));
}

struct TwoHeadsImpl : torch::nn::Module {
  explicit TwoHeadsImpl(const FullyShardOptions& options) {
    for (const auto* name : {"left", "right"}) {
      heads.emplace_back([] { return Linear(4, 4); }, options);
      register_module(name, heads.back().ptr());
    }
  }
  // Bit i: whether head i is called, and whether its result is used.
  at::Tensor forward(const at::Tensor& x, int called, int used) {
    at::Tensor sum = torch::zeros({});
    for (int i = 0; i < 2; ++i) {
      if ((called >> i & 1) == 0) continue;
      const auto y = heads[i](x).square().sum();
      sum = sum + (used >> i & 1 ? y : y.detach());
    }
    return sum;
  }
  std::vector<FullyShard<Linear>> heads;
};
TORCH_MODULE(TwoHeads);

// Parts of equal shapes, as of a tensor group: every rank got the part of rank
// 0, which was then divided once more.
WORLD_TEST(FsdpMistakes, PartsThatRanksOfItsGroupsHaveAreRefused, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    const auto refused = AllOf(HasSubstr("have different parts of 'weight'"),
                               HasSubstr("give group"));
    const auto sharded = [&](const lockstep::Placement& placement,
                             const ProcessGroupPtr& group) {
      Linear linear(4, 4);
      set_placement(linear->weight, placement, group);
      return message_of([&] { FullyShard<Linear>(linear, options); });
    };
    EXPECT_THAT(sharded(lockstep::Shard{.dim = 0}, {}), refused);
    EXPECT_THAT(sharded(lockstep::Own{}, {}), refused);
    take_replicas(world, options);
    EXPECT_THAT(
        sharded(lockstep::Own{}, options.group),
        world.size == 2 ? ::testing::Matcher<std::string>(IsEmpty()) : refused);
    EXPECT_THAT(sharded(lockstep::Own{}, options.replicate_group), refused);
  });
}

// The parameters of a new layer were stepped by each rank's own gradient, so
// the ranks drifted apart.
WORLD_TEST(FsdpMistakes, ALayerThatIsAddedOrReplacedAfterShardingIsNamed, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    using torch::nn::Sequential;
    const auto x = torch::ones({2, 3});
    FullyShard<Sequential> grown(Sequential(Linear(3, 3)), options);
    grown(x).sum().backward();
    grown.module()->push_back(Linear(3, 3));
    EXPECT_THAT(message_of([&] { grown(x); }),
                AllOf(HasSubstr("the module has 4 parameters"),
                      HasSubstr("'1.weight' of [3, 3] was not among them"),
                      HasSubstr("2 when it was wrapped")));
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      grown(x);
    };
    evaluate();  // changes nothing
    barrier();

    BothNets nets(options);
    nets.step(0, world.rank);
    nets.model.module()->blocks[1].module()->replace_module("up", Linear(3, 3));
    EXPECT_THAT(message_of([&] { nets.step(1, world.rank); }),
                HasSubstr("'block1.up.weight' of [3, 3] was not among them"));
  });
}

// With init_sync = false parameters were compared, and buffers were not.
WORLD_TEST(FsdpMistakes, FirstValuesOfBuffersAreCompared, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.init_sync = false;
    const auto sharded = [&](int64_t features, double mean) {
      torch::nn::BatchNorm1d norm(3);
      norm->running_mean.fill_(mean);
      norm->running_var.resize_({features});
      norm->running_var.fill_(1);
      return message_of(
          [&] { FullyShard<torch::nn::BatchNorm1d>(norm, options); });
    };
    EXPECT_EQ(sharded(3, 0), "");
    EXPECT_THAT(sharded(3, world.rank),
                HasSubstr("differ in buffer running_mean: Float [3], values"));
    options.init_sync = true;
    EXPECT_EQ(sharded(3, world.rank), "");
    EXPECT_THAT(sharded(3 + world.rank, 0),
                HasSubstr("differ in buffer running_var: Float [3] on rank 0, "
                          "Float [4] on rank 1"));
  });
}

// Units of equal sizes: the gradient of one rank's left head was averaged with
// that of the other's right head.
WORLD_TEST(FsdpMistakes, RanksThatUseDifferentUnits, 2, 3, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    // Neighbours gather parts of different units from each other.
    if (world.size == 4) options.reshard_after_forward = 2;
    FullyShard<TwoHeads> model([&] { return TwoHeads(options); }, options);
    const auto x = torch::ones({2, 4});
    const int own = world.rank == world.size - 1 ? 2 : 1;
    const auto expect_refused = [&](const std::function<void()>& body) {
      const auto message = message_of(body);
      EXPECT_THAT(message,
                  AllOf(HasSubstr("unit left"), HasSubstr("unit right"),
                        HasSubstr("rank " + std::to_string(world.size - 1))))
          << message;
    };
    for (int turn = 0; turn < 2; ++turn) {
      expect_refused([&] { model(x, 3, own).backward(); });
      expect_refused([&] { model(x, own, own).backward(); });
      for (const auto& shard : model->parameters()) {
        EXPECT_FALSE(shard.grad().defined());
      }
      // Evaluation, too, if the parameters are gathered.
      if (!options.shared_memory) {
        const torch::NoGradGuard no_grad;
        expect_refused([&] { model(x, own, 0); });
      }
      model(x, 3, 3).backward();
      for (auto& shard : model->parameters()) {
        EXPECT_TRUE(shard.grad().defined());
        shard.mutable_grad().reset();
      }
    }
  });
}

// Ranks remember the last 4,096 acts only, and not the same ones if one rank
// had more of them.
WORLD_TEST(FsdpMistakes, OrdersAreComparedWhereAllRanksRememberThem, 2, 3) {
  auto group = init_process_group();
  const bool is_last = world.rank == world.size - 1;
  const auto difference = [&](size_t before, size_t first, size_t last) {
    UnitOrder order;
    const auto note = [&](size_t unit) {
      order.note(UnitOrder::Act::gather, unit);
    };
    for (size_t i = 0; i < before; ++i) note(0);
    note(first);
    for (int i = 0; i < 5000; ++i) note(0);
    note(last);
    std::vector<int64_t> bits{world.rank == 0, is_last};
    const auto name_of = [](size_t unit) {
      return "unit " + std::to_string(unit);
    };
    const auto found = order.difference(group, name_of, bits);
    EXPECT_EQ(bits[1], is_last || !found);
    EXPECT_FALSE(order.difference(group, name_of, bits));
    EXPECT_THAT(bits, ElementsAre(1, 1));
    return found.value_or("none");
  };
  const std::string prefix = "the ranks do not go through the same units: ";
  EXPECT_EQ(difference(0, 1, 2), "none");
  EXPECT_THAT(difference(is_last ? 1 : 0, 0, 2),
              HasSubstr(prefix + "rank 0 gathered unit 2, but rank " +
                        std::to_string(world.size - 1) + " gathered unit 0;"));
  EXPECT_THAT(difference(0, is_last ? 1 : 0, 2),
              HasSubstr(prefix + "where they differ is forgotten;"));
}

WORLD_TEST(FsdpMistakes, ReplicasThatUseDifferentUnits, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    const int half = world.size / 2;
    take_replicas(world, options);
    FullyShard<TwoHeads> model([&] { return TwoHeads(options); }, options);
    const auto x = torch::ones({2, 4});
    EXPECT_THAT(
        message_of([&] { model(x, 3, 1 + world.rank / half).backward(); }),
        AllOf(HasSubstr("reduced unit left"), HasSubstr("reduced unit right")));
    for (const auto& shard : model->parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
    model(x, 3, 3).backward();
  });
}

// The gradients of the inputs alone, as a gradient penalty needs them.
WORLD_TEST(FsdpMistakes, GradOfInputsLeavesTheParametersAlone, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    torch::manual_seed(3);
    FullyShard<Block> model([] { return Block(kWidth); }, options);
    torch::manual_seed(3);
    Block plain(kWidth);
    const auto x = torch::ones({2, kWidth}).requires_grad_();
    for (int turn = 0; turn < 2; ++turn) {
      const auto grad = torch::autograd::grad({model(x).square().sum()}, {x});
      const auto want = torch::autograd::grad({plain(x).square().sum()}, {x});
      EXPECT_TRUE(torch::equal(grad[0], want[0]));
      for (auto& shard : model->parameters()) {
        EXPECT_FALSE(shard.grad().defined());
      }
    }
    model(x).square().sum().backward();
    for (auto& shard : model->parameters()) EXPECT_TRUE(shard.grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::internal
