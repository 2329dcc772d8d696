// Tests what a program sees of parameters(): shards that behave like
// parameters, and what would train nothing in silence.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adam.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using torch::nn::Linear;

// nanoGPT's groups: weights decay, vectors do not. Shards of one dimension
// decayed nothing.
template <typename Parameters>
std::vector<torch::optim::OptimizerParamGroup> groups_by_dim(
    const Parameters& parameters) {
  std::vector<at::Tensor> weights, vectors;
  for (const auto& parameter : parameters) {
    (parameter.dim() >= 2 ? weights : vectors).push_back(parameter);
  }
  return {{std::move(weights),
           std::make_unique<torch::optim::AdamWOptions>(
               torch::optim::AdamWOptions(0.01).weight_decay(0.5))},
          {std::move(vectors),
           std::make_unique<torch::optim::AdamWOptions>(
               torch::optim::AdamWOptions(0.01).weight_decay(0))}};
}

WORLD_TEST(FsdpShards, GroupsByDimensionsAreThoseOfOneProcess, 1, 2, 3) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    BothNets nets(options);
    torch::optim::AdamW plain_optimizer(groups_by_dim(nets.plain->parameters()),
                                        adamw());
    torch::optim::AdamW optimizer(groups_by_dim(nets.model->parameters()),
                                  adamw());
    for (int step = 0; step < 3; ++step) {
      plain_step(nets.plain, plain_optimizer, step, world.size);
      optimizer.zero_grad();
      nets.backward(step, world.rank);
      optimizer.step();
    }
    nets.expect_equal(1e-12);
  });
}

// Regression: a clone of a divided module had tensors of this rank's elements,
// and called with them it gave results of other shapes, without an error.
WORLD_TEST(FsdpShards, AnAverageIsASecondFullyShard, 1, 2, 3) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    const auto make = [] {
      torch::manual_seed(1);
      torch::nn::Sequential net(Linear(5, 7), torch::nn::Tanh(), Linear(7, 3));
      net->to(at::kDouble);
      return net;
    };
    auto plain = make();
    FullyShard<torch::nn::Sequential> model(make, options);
    FullyShard<torch::nn::Sequential> unit(make, options);
    const AveragedModelOptions ema{.avg_fn = get_ema_avg_fn(0.5)};
    AveragedModel<torch::nn::Sequential> average(model.module(), unit.module(),
                                                 ema);
    AveragedModel<torch::nn::Sequential> plain_average(plain, ema);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    const auto x = torch::ones({2, 5}, at::kDouble);
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      {
        const torch::AutoGradMode grad(true);
        optimizer.zero_grad();
        model(x).square().mean().backward();
        plain_optimizer.zero_grad();
        plain->forward(x).square().mean().backward();
      }
      optimizer.step();
      average.update_parameters(model);
      plain_optimizer.step();
      plain_average.update_parameters(plain);
      EXPECT_TRUE(torch::allclose(unit(x), plain_average(x), 1e-12));
    }
    if (world.size == 1) return;
    EXPECT_THAT(message_of([&] {
                  AveragedModel<torch::nn::Sequential> copy(model.module());
                }),
                HasSubstr("FullyShard has divided its '0.weight'"));
    EXPECT_THAT(message_of([&] {
                  AveragedModel<torch::nn::Sequential> copy(model.module(),
                                                            plain);
                }),
                HasSubstr("has divided only one of the model and its average"));
  });
}

// Shards had one dimension until lately, also in the optimizer's state.
WORLD_TEST(FsdpShards, SnapshotsOfShardsOfOneDimensionAreLoaded, 1, 2, 3) {
  auto group = init_process_group();
  const std::string path = (world.folder / "old").string() + "/";
  BothNets nets({});
  auto old = BothNets::seeded<PlainNet>({});
  torch::optim::AdamW old_optimizer(old->parameters(), adamw());
  const auto shards = nets.model.ptr()->named_parameters();
  const auto whole = nets.plain->named_parameters();
  for (auto& item : old->named_parameters()) {
    const auto layout = *layout_of(shards[item.key()]);
    const auto part = [&](const at::Tensor& tensor) {
      return tensor.detach()
          .flatten()
          .slice(0, layout.range->begin, layout.range->end)
          .clone();
    };
    at::Tensor& parameter = item.value();
    parameter.set_data(part(parameter));
    set_layout(parameter, layout);
    at::Tensor gradient = torch::randn_like(whole[item.key()]);
    all_reduce(gradient);
    whole[item.key()].mutable_grad() = gradient;
    parameter.mutable_grad() = part(gradient);
  }
  for (int step = 0; step < 2; ++step) {
    nets.plain_optimizer.step();
    old_optimizer.step();
  }
  save_snapshot(path, {.model = old.ptr(), .optimizer = &old_optimizer});

  TrainingState state{.model = nets.model.ptr(), .optimizer = &nets.optimizer};
  ASSERT_TRUE(load_snapshot(path, state));
  nets.expect_equal(0);
  for (int step = 0; step < 3; ++step) {
    nets.plain_step(step, world.size);
    nets.step(step, world.rank);
  }
  nets.expect_equal(1e-12);
}

struct StepsAtOnce : torch::autograd::PostAccumulateGradHook {
  explicit StepsAtOnce(int* given) : calls(given) {}
  void operator()(const at::Tensor& parameter) override {
    ++*calls;
    const torch::NoGradGuard no_grad;
    at::Tensor(parameter).sub_(0.1 * parameter.grad());
    parameter.mutable_grad().reset();
  }
  int* calls;
};

// Hooks of parameters were never called. One that steps its parameter writes
// memory that other ranks read in shared memory until they have ended backward.
WORLD_TEST(FsdpShards, HooksOfShardsAreCalled, 1, 2, 3) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    BothNets nets(options);
    int calls = 0;
    for (auto& shard : nets.model->parameters()) {
      shard.register_hook([](const at::Tensor& grad) { return grad * 0.5; });
      torch::autograd::impl::set_post_acc_grad_hooks(
          shard, std::make_unique<StepsAtOnce>(&calls));
    }
    torch::optim::SGD plain_optimizer(nets.plain->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      plain_step(nets.plain, plain_optimizer, step, world.size);
      nets.backward(step, world.rank);
    }
    EXPECT_EQ(calls, 3 * static_cast<int>(nets.model->parameters().size()));
    {
      const auto local = nets.model.no_sync();
      nets.backward(3, world.rank);
    }
    EXPECT_EQ(calls, 3 * static_cast<int>(nets.model->parameters().size()));
    nets.expect_equal(1e-12);
  });
}

// Found no gradients, and stepped nothing.
WORLD_TEST(FsdpShards, AnOptimizerFromBeforeShardingThrows, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    Block block(kWidth);
    torch::optim::AdamW stale(block->parameters(), adamw().weight_decay(0));
    torch::optim::SGD stale_sgd(block->parameters(), 0.1);
    optim::AdamW stale_fused(block->parameters());
    FullyShard<Block> unit(block, options);
    torch::optim::AdamW optimizer(unit->parameters(), adamw());
    for (int step = 0; step < 2; ++step) {
      unit(torch::ones({2, kWidth})).sum().backward();
      EXPECT_THAT(message_of([&] { stale.step(); }),
                  HasSubstr("Make the optimizer from those"));
      EXPECT_THAT(message_of([&] { stale_sgd.step(); }),
                  HasSubstr("FullyShard: "));
      // A training that goes on rightly is not disturbed.
      optimizer.step();
      stale.zero_grad();
    }
    unit(torch::ones({2, kWidth})).sum().backward();
    EXPECT_THAT(message_of([&] { stale_fused.step(); }),
                HasSubstr("FullyShard: "));
    barrier();
  });
}

// Each rank clipped by the norm of its own part.
WORLD_TEST(FsdpShards, ClippingByLibTorchIsRefused, 1, 2, 3) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    BothNets nets(options);
    torch::optim::SGD plain_sgd(nets.plain->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD sgd(nets.model->parameters(),
                          torch::optim::SGDOptions(0.1).momentum(0.9));
    // Correct programs are not refused.
    for (int step = 0; step < 3; ++step) {
      plain_step(nets.plain, plain_sgd, step, world.size);
      sgd.zero_grad();
      nets.backward(step, world.rank);
      torch::nn::utils::clip_grad_value_(nets.model->parameters(), 1e3);
      sgd.step();
    }
    nets.expect_equal(1e-12);
    for (const double norm_type : {2.0, 1.0}) {
      sgd.zero_grad();
      nets.backward(3, world.rank);
      torch::nn::utils::clip_grad_norm_(nets.model->parameters(), 1e3,
                                        norm_type);
      sgd.step();
      sgd.zero_grad();
      const auto said = message_of([&] { nets.backward(4, world.rank); });
      if (world.size == 1) {
        EXPECT_EQ(said, "");
      } else {
        EXPECT_THAT(said, HasSubstr("call lockstep::clip_grad_norm_ instead"));
      }
    }
    nets.backward(5, world.rank);
  });
}

struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    for (const auto* name : {"always", "sometimes", "never"}) {
      register_module(name, Linear(kWidth, kWidth));
    }
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool use) {
    const auto part = [&](const char* name) {
      return std::dynamic_pointer_cast<torch::nn::LinearImpl>(
          named_children()[name]);
    };
    const auto y = part("always")->forward(x);
    return use ? y + part("sometimes")->forward(x) : y;
  }
};
TORCH_MODULE(Parts);

// Such a parameter got zeros, by which AdamW decays it.
WORLD_TEST(FsdpShards, WhatNoRankUsesHasNoGradient, 1, 2, 4) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const bool replicated : {false, true}) {
      if (replicated && world.size < 4) continue;
      if (replicated) take_replicas(world, options);
      FullyShard<Parts> model(Parts(), options);
      const auto expect_defined = [&](bool sometimes, bool never) {
        for (const auto& item : model->named_parameters()) {
          const bool want =
              item.key().starts_with("always") ||
              (item.key().starts_with("some") ? sometimes : never);
          EXPECT_EQ(item.value().grad().defined(), want) << item.key();
        }
      };
      const auto x = torch::ones({2, kWidth}, torch::kDouble);
      for (int turn = 0; turn < 3; ++turn) {
        model->zero_grad();
        model(x, false).sum().backward();
        expect_defined(false, false);
        // Accumulates where one rank has a gradient.
        model(x, world.rank == world.size - 1).sum().backward();
        expect_defined(true, false);
        model(x, false).sum().backward();
        expect_defined(true, false);
        model->zero_grad();
        {
          const auto local = model.no_sync();
          model(x, world.rank == 0).sum().backward();
        }
        model(x, false).sum().backward();
        expect_defined(true, false);
      }
      // A gradient that the program adds by itself stays.
      model->zero_grad();
      const auto loss = model(x, false).sum();
      at::Tensor penalty = torch::zeros({}, torch::kDouble);
      for (const auto& shard : model->parameters()) {
        penalty = penalty + shard.square().sum();
      }
      (loss + penalty).backward();
      expect_defined(true, true);
      for (const auto& item : model->named_parameters()) {
        if (item.key().starts_with("always")) continue;
        EXPECT_TRUE(item.value().grad().equal(2 * item.value()));
      }
    }
  });
}

WORLD_TEST(FsdpShards, OtherFirstValuesAreRefusedWithoutInitSync, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.init_sync = false;
    torch::manual_seed(3 + world.rank);
    EXPECT_THAT(message_of([&] { FullyShard<Linear>(Linear(3, 3), options); }),
                HasSubstr("with equal values unless init_sync is set"));
    torch::manual_seed(3);
    FullyShard<Linear> works(Linear(3, 3), options);
  });
}

}  // namespace
}  // namespace lockstep::internal
