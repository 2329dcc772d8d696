// Training with FullyShard gives what one process gives on the batches of all
// ranks together, on every path and with every option.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/trace/flight_recorder.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

using namespace testing;

constexpr double kFsdpBound = 1e-12;

// In shared memory the gradients of weights stay where backward computes them,
// and those of biases are copied.
[[maybe_unused]] const int kPlaced =
    ::setenv("LOCKSTEP_PLACED_BYTES", "400", /*replace=*/1);

static_assert(!ReshardAfterForward(true).ranks());
static_assert(ReshardAfterForward(false).ranks() == 1);
static_assert(ReshardAfterForward(2).ranks() == 2);
static_assert(!std::convertible_to<const char*, ReshardAfterForward>);

// Lets pairs of neighbours gather in backward, if there are more ranks.
void gather_from_neighbours(const World& world, FullyShardOptions& options) {
  if (world.size == 4) options.reshard_after_forward = 2;
}

WORLD_TEST(Fsdp, TrainsLikeOneProcess, 1, 2, 3, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    std::vector<std::optional<ReshardAfterForward>> ways{{}, true, false};
    if (world.size % 2 == 0) ways.emplace_back(2);
    std::vector<at::Tensor> values;
    for (const auto& reshards : ways) {
      options.reshard_after_forward = reshards;
      BothNets nets(options);
      nets.expect_equal(0);
      for (int step = 0; step < 4; ++step) {
        const double want = nets.plain_step(step, world.size);
        nets.optimizer.zero_grad();
        auto mean = nets.backward(step, world.rank);
        nets.optimizer.step();
        all_reduce(mean, {.op = ReduceOp::AVG});
        EXPECT_NEAR(mean.item<double>(), want, kFsdpBound);
      }
      nets.expect_equal(kFsdpBound);
      // The way in which parameters are gathered does not change a bit.
      std::vector<at::Tensor> flat;
      for (const auto& shard : nets.model->parameters()) {
        flat.push_back(shard.detach().view({-1}));
      }
      values.push_back(torch::cat(flat));
      EXPECT_TRUE(torch::equal(values.back(), values.front()));
    }
  });
}

WORLD_TEST(Fsdp, AccumulatesGradients, 2, 4) {
  enum class Way { no_sync, switched_off, in_shards, all_forwards_first, one };
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    gather_from_neighbours(world, options);
    std::vector<Way> ways{Way::no_sync, Way::all_forwards_first};
    if (world.size == 2) {
      ways.insert(ways.end(), {Way::switched_off, Way::in_shards, Way::one});
    }
    for (const Way way : ways) {
      SCOPED_TRACE(static_cast<int>(way));
      BothNets nets(options);
      constexpr int kMicro = 3;
      for (int step = 0; step < 2; ++step) {
        nets.plain_step(step, world.size, kMicro);
        nets.optimizer.zero_grad();
        std::vector<at::Tensor> losses;
        for (int micro = 0; micro < kMicro; ++micro) {
          const int batch = step * kMicro + micro;
          const bool last = micro == kMicro - 1;
          if (way == Way::no_sync && !last) {
            const auto local = nets.model.no_sync();
            nets.backward(batch, world.rank);
          } else if (way == Way::all_forwards_first || way == Way::one) {
            const auto tokens = tokens_of(batch, world.rank);
            losses.push_back(loss_of(nets.model(tokens), tokens));
          } else {
            if (way == Way::switched_off) {
              nets.model.set_requires_gradient_sync(last);
            }
            nets.backward(batch, world.rank);
          }
        }
        if (way == Way::one) losses = {torch::stack(losses).sum()};
        for (auto& loss : losses) loss.backward();
        nets.optimizer.step();
      }
      nets.expect_equal(kFsdpBound);
    }
  });
}

// An accumulation that was given up: the next backward averaged it, too.
WORLD_TEST(Fsdp, ZeroGradDropsWhatNoSyncHasKept, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const bool half : {false, true}) {
      for (const bool sets_to_none : {true, false}) {
        options.mp_policy = {};
        if (half) {
          options.mp_policy = {.param_dtype = at::kBFloat16,
                               .reduce_dtype = at::kFloat};
        }
        struct TwoImpl : torch::nn::Module {
          explicit TwoImpl(const FullyShardOptions& given)
              : first([] { return torch::nn::Linear(3, 3); }, given) {
            register_module("first", first.ptr());
            second = register_module("second", torch::nn::Linear(3, 3));
          }
          at::Tensor forward(const at::Tensor& x, bool both) {
            return both ? second(first(x)) : second(x);
          }
          FullyShard<torch::nn::Linear> first;
          torch::nn::Linear second{nullptr};
        };
        FullyShard<TwoImpl> model(std::make_shared<TwoImpl>(options), options);
        const auto x = torch::ones({1, 3});
        {
          const auto guard = model.no_sync();
          model(x, true).sum().backward();
        }
        model->zero_grad(sets_to_none);
        model(x, false).sum().backward();
        for (const auto& item : model->named_parameters()) {
          const auto& grad = item.value().grad();
          if (item.key().starts_with("second")) {
            EXPECT_TRUE(torch::equal(grad, torch::ones_like(grad)))
                << item.key();
          } else if (sets_to_none) {
            EXPECT_FALSE(grad.defined()) << item.key();
          } else {
            EXPECT_TRUE(torch::equal(grad, torch::zeros_like(grad)))
                << item.key();
          }
        }
        // That of one unit leaves the other's.
        model->zero_grad();
        {
          const auto guard = model.no_sync();
          model(x, true).sum().backward();
        }
        model.module()->first->zero_grad();
        model(x, false).sum().backward();
        for (const auto& item : model->named_parameters()) {
          const auto& grad = item.value().grad();
          if (item.key() == "second.bias") {
            EXPECT_TRUE(torch::equal(grad, torch::full_like(grad, 2)));
          }
          if (item.key().starts_with("first")) {
            EXPECT_FALSE(grad.defined());
          }
        }
      }
    }
  });
}

// Autograd took what a unit got for views "created inside a custom Function".
WORLD_TEST(Fsdp, UnitsMayChangeTheirInputsInPlace, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    const auto make = [] {
      torch::manual_seed(5);
      torch::nn::Sequential model(torch::nn::ReLU(/*inplace=*/true),
                                  torch::nn::Linear(5, 5));
      model->to(torch::kDouble);
      return model;
    };
    torch::nn::Sequential plain = make();
    const auto given = make();
    FullyShard<torch::nn::Sequential> unit(given, options);
    const auto x = torch::randn({4, 5}, torch::kDouble);
    auto mine = x.clone().requires_grad_();
    auto expected = x.clone().requires_grad_();
    unit(mine * 2).pow(2).sum().backward();
    plain->forward(expected * 2).pow(2).sum().backward();
    EXPECT_TRUE(mine.grad().allclose(expected.grad(), 0, kFsdpBound));
    for (const auto& item : unit->named_parameters()) {
      const auto want = part_of(plain->named_parameters()[item.key()].grad(),
                                *layout_of(item.value()));
      EXPECT_TRUE(item.value().grad().allclose(want, 0, kFsdpBound));
    }
  });
}

WORLD_TEST(Fsdp, FrozenParametersMayChangeBetweenSteps, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    gather_from_neighbours(world, options);
    // Freezes a whole unit, a part of one, and what the units' inputs need.
    const auto freeze = [](auto& net, bool frozen) {
      for (const auto& item : net.named_parameters()) {
        if (item.key().starts_with("block1") || item.key() == "head.bias" ||
            item.key() == "block2.gain" || item.key() == "embedding.weight") {
          item.value().set_requires_grad(!frozen);
        }
      }
    };
    for (const bool before : {false, true}) {
      auto plain = BothNets::seeded<PlainNet>(options);
      freeze(*plain, before);
      FullyShard<ShardedNet> model(
          [&] {
            auto net = BothNets::seeded<ShardedNet>(options);
            return net;
          },
          options);
      freeze(*model.ptr(), before);
      torch::optim::AdamW plain_optimizer(plain->parameters(), adamw());
      torch::optim::AdamW optimizer(model->parameters(), adamw());
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          freeze(*plain, !before);
          freeze(*model.ptr(), !before);
        }
        plain_step(plain, plain_optimizer, step, world.size);
        optimizer.zero_grad();
        const auto tokens = tokens_of(step, world.rank);
        loss_of(model(tokens), tokens).backward();
        for (const auto& item : model->named_parameters()) {
          EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad())
              << item.key();
        }
        optimizer.step();
      }
      expect_equal(*model.ptr(), *plain, kFsdpBound);
    }
  });
}

// Regression: the backward gathered the block before the trained ones, which no
// graph owned any more.
WORLD_TEST(Fsdp, AGraphMayOutliveItsModel, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    const auto freeze = [](auto& net) {
      for (const auto& item : net.named_parameters()) {
        if (item.key().starts_with("embedding") ||
            item.key().starts_with("block0")) {
          item.value().set_requires_grad(false);
        }
      }
    };
    auto plain = BothNets::seeded<PlainNet>(options);
    freeze(*plain);
    for (int rank = 0; rank < world.size; ++rank) {
      const auto tokens = tokens_of(0, rank);
      (loss_of(plain(tokens), tokens) / world.size).backward();
    }
    torch::OrderedDict<std::string, at::Tensor> shards;
    at::Tensor loss;
    {
      FullyShard<ShardedNet> model(
          [&] { return BothNets::seeded<ShardedNet>(options); }, options);
      freeze(*model.ptr());
      const auto tokens = tokens_of(0, world.rank);
      loss = loss_of(model(tokens), tokens);
      shards = model->named_parameters();
    }
    loss.backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : shards) {
      const auto& gradient = item.value().grad();
      ASSERT_EQ(gradient.defined(), item.value().requires_grad()) << item.key();
      if (!gradient.defined()) continue;
      EXPECT_TRUE(gradient.allclose(
          part_of(expected[item.key()].grad(), *layout_of(item.value())), 0,
          kFsdpBound))
          << item.key();
    }
  });
}

// Uses a part only if it is told to.
struct SwitchImpl : torch::nn::Module {
  SwitchImpl() {
    always = register_module("always", torch::nn::Linear(kWidth, kWidth));
    sometimes = register_module("sometimes", torch::nn::Linear(kWidth, kWidth));
    scale = register_parameter("scale", torch::full({}, 0.5));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool use) {
    const auto y = scale * always(x).tanh();
    return use ? y + sometimes(x) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Switch);

template <template <typename> class Unit>
struct SwitchNetImpl : torch::nn::Module {
  explicit SwitchNetImpl(const FullyShardOptions& options)
      : first([] { return Switch(); }, options),
        second([] { return Switch(); }, options) {
    register_module("first", first.ptr());
    register_module("second", second.ptr());
  }
  // Calls one unit twice.
  at::Tensor forward(const at::Tensor& x, bool use) {
    return first(second(first(x, use), !use), false);
  }
  Unit<Switch> first, second;
};
template <template <typename> class Unit>
struct SwitchNet : torch::nn::ModuleHolder<SwitchNetImpl<Unit>> {
  using torch::nn::ModuleHolder<SwitchNetImpl<Unit>>::ModuleHolder;
};

WORLD_TEST(Fsdp, RanksMayUseDifferentParameters, 1, 2, 3, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    gather_from_neighbours(world, options);
    torch::manual_seed(3);
    SwitchNet<PlainUnit> plain(options);
    torch::manual_seed(3);
    FullyShard<SwitchNet<FullyShard>> model(
        [&] { return SwitchNet<FullyShard>(options); }, options);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto batch = [](int step, int rank) {
      torch::manual_seed(static_cast<uint64_t>(step * 10 + rank));
      return torch::randn({6, kWidth}, torch::kDouble);
    };
    for (int step = 0; step < 5; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      // In the last step no rank uses one of the parts.
      const auto uses = [&](int rank) {
        return step < 4 && (rank + step) % 2 == 0;
      };
      for (int rank = 0; rank < world.size; ++rank) {
        (plain(batch(step, rank), uses(rank)).square().mean() / world.size)
            .backward();
      }
      // Inputs that need a gradient themselves, too.
      auto x = batch(step, world.rank).requires_grad_(step % 2 == 1);
      model(x, uses(world.rank)).square().mean().backward();
      EXPECT_EQ(x.grad().defined(), step % 2 == 1);
      plain_optimizer.step();
      optimizer.step();
    }
    expect_equal(*model.ptr(), *plain, kFsdpBound);
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    in = register_module("in", torch::nn::Embedding(kTokens, kWidth));
    out = register_parameter("out", in->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return torch::linear(in(tokens).tanh(), out);
  }
  torch::nn::Embedding in{nullptr};
  at::Tensor out;
};
TORCH_MODULE(Tied);

WORLD_TEST(Fsdp, TiedParametersAreOne, 2, 3) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    torch::manual_seed(3);
    Tied plain;
    torch::manual_seed(3);
    FullyShard<Tied> model([] { return Tied(); }, options);
    ASSERT_EQ(distinct(model->parameters()).size(), 1U);
    torch::optim::SGD plain_optimizer(distinct(plain->parameters()), 0.5);
    torch::optim::SGD optimizer(distinct(model->parameters()), 0.5);
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      for (int rank = 0; rank < world.size; ++rank) {
        const auto tokens = tokens_of(step, rank);
        (loss_of(plain(tokens), tokens) / world.size).backward();
      }
      const auto tokens = tokens_of(step, world.rank);
      loss_of(model(tokens), tokens).backward();
      plain_optimizer.step();
      optimizer.step();
    }
    expect_equal(*model.ptr(), *plain, 1e-6);
  });
}

WORLD_TEST(Fsdp, EvaluatesAndTakesValuesByHand, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    for (int step = 0; step < 4; ++step) {
      nets.plain_step(step, world.size);
      nets.step(step, world.rank);
      for (int change = 0; change < 2; ++change) {
        const torch::NoGradGuard no_grad;
        const auto tokens = tokens_of(100 + step, world.rank);
        EXPECT_LE((nets.model(tokens) - nets.plain(tokens))
                      .abs()
                      .max()
                      .item<double>(),
                  kFsdpBound);
        for (auto& parameter : nets.plain->parameters()) parameter.mul_(0.9);
        for (auto& shard : nets.model->parameters()) shard.mul_(0.9);
      }
      // The full parameters, without a forward.
      for (auto& block : nets.model.module()->blocks) block.unshard();
      EXPECT_LE((nets.model.module()->blocks[1].module()->up->weight -
                 nets.plain->blocks[1]->up->weight)
                    .abs()
                    .max()
                    .item<double>(),
                kFsdpBound);
      for (auto& block : nets.model.module()->blocks) block.reshard();
      // A gather in advance.
      nets.model.module()->blocks[0].unshard(/*async_op=*/true);
    }
    nets.expect_equal(kFsdpBound);
  });
}

// A bug: what stayed unsharded over a step kept the values from before it.
WORLD_TEST(Fsdp, UnitsThatStayUnshardedHaveTheValuesOfTheLastStep, 2, 3) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    BothNets nets(options);
    for (int step = 0; step < 3; ++step) {
      auto& blocks = nets.model.module()->blocks;
      for (auto& block : blocks) block.unshard();
      blocks[0].reshard();
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : nets.plain->parameters()) parameter.mul_(0.9);
        for (auto& shard : nets.model->parameters()) shard.mul_(0.9);
      }
      nets.plain_step(step, world.size);
      nets.step(step, world.rank);
      nets.expect_equal(kFsdpBound);
    }
  });
}

// Computes its units again in backward.
struct RecomputingNetImpl : BlockNetImpl<FullyShard> {
  using BlockNetImpl<FullyShard>::BlockNetImpl;
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = checkpoint(block, x);
    return head(x);
  }
};

// checkpoint() called the module of a unit, which has no parameters then.
WORLD_TEST(Fsdp, UnitsMayBeComputedAgainInBackward, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    gather_from_neighbours(world, options);
    auto plain = BothNets::seeded<PlainNet>(options);
    torch::manual_seed(3);
    FullyShard<RecomputingNetImpl> model(
        std::make_shared<RecomputingNetImpl>(options), options);
    torch::optim::AdamW plain_optimizer(plain->parameters(), adamw());
    torch::optim::AdamW optimizer(model->parameters(), adamw());
    for (int step = 0; step < 4; ++step) {
      plain_step(plain, plain_optimizer, step, world.size);
      optimizer.zero_grad();
      const auto tokens = tokens_of(step, world.rank);
      loss_of(model(tokens), tokens).backward();
      optimizer.step();
    }
    expect_equal(*model.ptr(), *plain, kFsdpBound);
  });
}

// Gradients of low precision of the model with the values of `master`.
void add_low_gradients(const PlainNet& master, PlainNet& low, int step,
                       int rank, int world_size) {
  low->zero_grad();
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < low->parameters().size(); ++i) {
      low->parameters()[i].copy_(master->parameters()[i]);
    }
  }
  const auto tokens = tokens_of(step, rank);
  loss_of(low(tokens), tokens).backward();
  for (size_t i = 0; i < low->parameters().size(); ++i) {
    auto grad = low->parameters()[i].grad().to(at::kFloat) /
                static_cast<double>(world_size);
    auto& sum = master->parameters()[i].mutable_grad();
    sum = sum.defined() ? sum + grad : grad;
  }
}

WORLD_TEST(Fsdp, ComputesInAnotherDtype, 1, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    gather_from_neighbours(world, options);
    options.mp_policy = {.param_dtype = at::kBFloat16,
                         .reduce_dtype = at::kFloat};
    auto outermost = options;
    outermost.mp_policy.output_dtype = at::kFloat;
    const auto make = [&]<typename Net>(Net*) {
      torch::manual_seed(3);
      return Net(options, 2, at::kFloat);
    };
    auto plain = make(static_cast<PlainNet*>(nullptr));
    auto low = make(static_cast<PlainNet*>(nullptr));
    low->to(at::kBFloat16);
    FullyShard<ShardedNet> model(
        [&] { return make(static_cast<ShardedNet*>(nullptr)); }, outermost);
    torch::optim::AdamW plain_optimizer(plain->parameters(), adamw());
    torch::optim::AdamW optimizer(model->parameters(), adamw());
    constexpr int kMicro = 2;
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      for (int micro = 0; micro < kMicro; ++micro) {
        const int batch = kMicro * step + micro;
        for (int rank = 0; rank < world.size; ++rank) {
          add_low_gradients(plain, low, batch, rank, world.size);
        }
        model.set_requires_gradient_sync(micro == kMicro - 1);
        const auto tokens = tokens_of(batch, world.rank);
        const auto logits = model(tokens);
        EXPECT_EQ(logits.scalar_type(), at::kFloat);
        loss_of(logits, tokens).backward();
      }
      plain_optimizer.step();
      optimizer.step();
      for (auto& shard : model->parameters()) {
        EXPECT_EQ(shard.scalar_type(), at::kFloat);
        EXPECT_EQ(shard.grad().scalar_type(), at::kFloat);
      }
    }
    expect_equal(*model.ptr(), *plain, 1e-6);
  });
}

WORLD_TEST(Fsdp, ReplicasOfShardsAreAveraged, 2, 4, 8) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    take_replicas(world, options);
    if (world.size == 8) options.reshard_after_forward = 2;
    BothNets nets(options);
    for (int step = 0; step < 4; ++step) {
      nets.plain_step(step, world.size);
      nets.step(step, world.rank);
    }
    nets.expect_equal(kFsdpBound);
  });
}

// The gathers of parameters that this rank has called in groups of `size`
// ranks. Those of numbers belong to an Agreement.
struct Gathers {
  int calls = 0;
  uint64_t elements = 0;  // that this rank gave
  bool operator==(const Gathers&) const = default;
};
Gathers gathers_among(int size) {
  Gathers sum;
  const FlightRecorder::Reading reading;
  for (const auto* one = reading.first(); one != nullptr; one = one->next()) {
    const auto& ranks = one->group().ranks;
    if (static_cast<int>(ranks.size()) != size) continue;
    EXPECT_EQ(ranks.front() % size, 0);
    EXPECT_EQ(ranks.back(), ranks.front() + size - 1);
    for (uint64_t id = 1; id <= one->last_id(); ++id) {
      FlightRecord record{};
      EXPECT_TRUE(one->read(id, record));
      if (record.call.operation != std::string("all_gather_into_tensor") ||
          record.call.dtype == std::string("Long")) {
        continue;
      }
      ++sum.calls;
      sum.elements += record.call.in_elements;
    }
  }
  return sum;
}

// Returns what `body` adds to gathers_among(size).
Gathers gathers_of(int size, const std::function<void()>& body) {
  const auto before = gathers_among(size);
  body();
  const auto after = gathers_among(size);
  return {after.calls - before.calls, after.elements - before.elements};
}

// Each parameter begins on a cache line of 8 elements, and so do the slices of
// all ranks: a block has 800 elements, and the outermost unit 320.
WORLD_TEST(Fsdp, BackwardGathersFromNeighbours, 4) {
  auto group = init_process_group("gloo");
  const FullyShardOptions pairs{.reshard_after_forward = 2};
  FullyShard<ShardedNet> model(
      [&] { return BothNets::seeded<ShardedNet>(pairs); });
  const auto tokens = tokens_of(0, world.rank);
  const auto step = [&] { loss_of(model(tokens), tokens).backward(); };
  const Gathers forward{4, (3 * 800 + 320) / 4};
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(gathers_of(4, step), forward);
    EXPECT_EQ(gathers_of(2, step), (Gathers{3, 3 * 800 / 2}));
  }
  // Also of the outermost unit, which stays whole unless it is told otherwise.
  model.set_reshard_after_forward(2, /*recurse=*/false);
  EXPECT_EQ(gathers_of(4, step), forward);
  EXPECT_EQ(gathers_of(2, step), (Gathers{4, (3 * 800 + 320) / 2}));
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    model(tokens);
  };
  EXPECT_EQ(gathers_of(4, evaluate), forward);
  EXPECT_EQ(gathers_of(2, evaluate), Gathers{});
  // Later forwards do not use the parts of one that has no backward.
  model(tokens);
  EXPECT_EQ(gathers_of(4, step), forward);
  model.set_reshard_after_forward(true);
  EXPECT_EQ(gathers_of(2, step), Gathers{});
  EXPECT_EQ(gathers_of(4, step), (Gathers{8, 2 * forward.elements}));
}

WORLD_TEST(Fsdp, AUnitThatIsCalledTwiceKeepsWhatItHas, 4) {
  auto group = init_process_group("gloo");
  const FullyShardOptions pairs{.reshard_after_forward = 2};
  FullyShard<SwitchNet<FullyShard>> model(
      [&] { return SwitchNet<FullyShard>(pairs); });
  const auto step = [&] {
    model(torch::ones({2, kWidth}, torch::kDouble).requires_grad_(), true)
        .sum()
        .backward();
  };
  EXPECT_EQ(gathers_of(4, step).calls, 2);
  // One for the second call in forward, and three in backward.
  EXPECT_EQ(gathers_of(2, step).calls, 4);
  // A unit that should stay was gathered again for its second backward.
  model.set_reshard_after_forward(false);
  EXPECT_EQ(gathers_of(4, step).calls, 2);
}

// Each rank kept its part of another model.
WORLD_TEST(Fsdp, RanksOfDifferentSeedsGetTheValuesOfRankZero, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    if (world.size == 4) {
      take_replicas(world, options);
    }
    torch::manual_seed(3);
    torch::nn::Linear plain(5, 7);
    torch::manual_seed(3 + world.rank);
    FullyShard<torch::nn::Linear> model(torch::nn::Linear(5, 7), options);
    expect_equal(*model.ptr(), *plain, 0);
  });
}

}  // namespace
}  // namespace lockstep::internal
