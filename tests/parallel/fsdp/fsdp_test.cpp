// Training with FullyShard gives what one process gives on the batches of all
// ranks together, on every path and with every option.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
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

WORLD_TEST(Fsdp, TrainsLikeOneProcess, 1, 2, 3, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const auto& reshards :
         {std::optional<bool>(), std::optional(true), std::optional(false)}) {
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
    }
  });
}

WORLD_TEST(Fsdp, AccumulatesGradients, 2) {
  enum class Way { no_sync, switched_off, in_shards, all_forwards_first, one };
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const Way way : {Way::no_sync, Way::switched_off, Way::in_shards,
                          Way::all_forwards_first, Way::one}) {
      SCOPED_TRACE(static_cast<int>(way));
      BothNets nets(options);
      constexpr int kMicro = 3;
      for (int step = 0; step < 3; ++step) {
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

WORLD_TEST(Fsdp, FrozenParametersMayChangeBetweenSteps, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
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

WORLD_TEST(Fsdp, RanksMayUseDifferentParameters, 1, 2, 3) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
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
      for (auto& block : nets.model->blocks) block.unshard();
      EXPECT_LE((nets.model->blocks[1]->up->weight -
                 nets.plain->blocks[1]->up->weight)
                    .abs()
                    .max()
                    .item<double>(),
                kFsdpBound);
      for (auto& block : nets.model->blocks) block.reshard();
      // A gather in advance.
      nets.model->blocks[0].unshard(/*async_op=*/true);
    }
    nets.expect_equal(kFsdpBound);
  });
}

// Computes its units again in backward.
struct RecomputingNetImpl : BlockNetImpl<FullyShard> {
  RecomputingNetImpl(const FullyShardOptions& options,
                     const CheckpointOptions& form)
      : BlockNetImpl<FullyShard>(options), form_(form) {}
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = checkpoint(form_, block, x);
    return head(x);
  }

 private:
  CheckpointOptions form_;
};

// checkpoint() called the module of a unit, which has no parameters then.
WORLD_TEST(Fsdp, UnitsMayBeComputedAgainInBackward, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const bool reentrant : {false, true}) {
      SCOPED_TRACE(reentrant);
      auto plain = BothNets::seeded<PlainNet>(options);
      torch::manual_seed(3);
      const CheckpointOptions form{.use_reentrant = reentrant};
      FullyShard<RecomputingNetImpl> model(
          std::make_shared<RecomputingNetImpl>(options, form), options);
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
    }
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

WORLD_TEST(Fsdp, ComputesInAnotherDtype, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
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

WORLD_TEST(Fsdp, ReplicasOfShardsAreAveraged, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    take_replicas(world, options);
    BothNets nets(options);
    for (int step = 0; step < 4; ++step) {
      nets.plain_step(step, world.size);
      nets.step(step, world.rank);
    }
    nets.expect_equal(kFsdpBound);
  });
}

WORLD_TEST(Fsdp, InitSyncGivesTheValuesOfRankZero, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.init_sync = true;
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
