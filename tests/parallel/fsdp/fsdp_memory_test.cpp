// The memory that FullyShard takes, counted by an allocator: that of the shards
// and of one or two units.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/metrics/memory_stats.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;
using torch::nn::Linear;

// Returns the most bytes since the last call.
int64_t take_peak() {
  const int64_t peak = max_memory_allocated();
  reset_peak_memory_stats();
  return peak;
}

constexpr int64_t kSide = 200;
constexpr int kLayers = 12;
constexpr int64_t kLayerBytes = (kSide * kSide + kSide) * 4;

struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(const FullyShardOptions& options) {
    for (int i = 0; i < kLayers; ++i) {
      layers.emplace_back([] { return Linear(kSide, kSide); }, options);
      register_module(std::to_string(i), layers.back().ptr());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x).tanh();
    return x;
  }
  std::vector<FullyShard<Linear>> layers;
};
TORCH_MODULE(Tower);

WORLD_TEST(FsdpMemory, IsShardsAndOneOrTwoUnits, 2, 4) {
  auto group = init_process_group("gloo");
  record_memory_stats();
  const int64_t before = memory_allocated();
  reset_peak_memory_stats();
  torch::manual_seed(1);
  const FullyShardOptions options{};
  FullyShard<Tower> model([&] { return Tower(options); }, options);
  const double shards = kLayers * kLayerBytes / static_cast<double>(world.size);
  const double unit = kLayerBytes;
  // Construction: all shards and one unit, and while its first values are made
  // equal what LibTorch's Gloo copies of it.
  const auto built = static_cast<double>(take_peak() - before);
  EXPECT_GE(built, 0.85 * (shards + unit));
  EXPECT_LE(built, 1.15 * (shards + 2 * unit));
  // A thread of LibTorch's Gloo may still have a copy of what it sent last.
  const auto kept = static_cast<double>(memory_allocated() - before);
  EXPECT_GE(kept, 0.85 * shards);
  EXPECT_LE(kept, 1.15 * shards + unit);

  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.01).momentum(0.9));
  const auto x = torch::randn({2, kSide});
  const auto counted = [&] {
    return static_cast<double>(take_peak() - before);
  };
  // LibTorch's Gloo makes copies: of what it gathers, and of what it reduces,
  // with the result.
  const double copied = unit;
  const double reduced = unit + unit / world.size;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    take_peak();
    const auto loss = model(x).square().mean();
    // Forward: the unit that computes, and the one that is gathered.
    const double momentum = step == 0 ? 0 : shards;
    EXPECT_LT(counted(), 1.15 * (shards + momentum + 2 * unit + copied));
    loss.backward();
    // Backward: these two, the gradients of one unit, what is being reduced,
    // and all shards of gradients.
    const double resident = 2 * shards + momentum;
    const double peak = counted();
    EXPECT_LT(peak, 1.15 * (resident + 4 * unit + copied + reduced));
    EXPECT_GT(peak, 0.85 * (resident + 2 * unit));
    optimizer.step();
  }
}

WORLD_TEST(FsdpMemory, AfterForwardIsAPartOfEachUnit, 4) {
  auto group = init_process_group("gloo");
  record_memory_stats();
  const double unit = kLayerBytes;
  const double units = kLayers * unit;
  const auto x = torch::randn({2, kSide});
  // Threads of LibTorch's Gloo may still have copies of what they sent.
  constexpr double kCopies = 2;
  const auto expect_kept = [&](ReshardAfterForward reshards, double kept) {
    const FullyShardOptions options{.reshard_after_forward = reshards};
    FullyShard<Tower> model([&] { return Tower(options); }, options);
    model(x).square().mean().backward();
    const int64_t before = memory_allocated();
    const auto more = [&] {
      return static_cast<double>(memory_allocated() - before);
    };
    for (int step = 0; step < 2; ++step) {
      auto loss = model(x).square().mean();
      EXPECT_NEAR(more(), kept, kCopies * unit);
      loss.backward();
      loss.reset();
      EXPECT_NEAR(more(), 0, kCopies * unit);
    }
    if (reshards.ranks() == 1) return;
    // Evaluation keeps nothing.
    const torch::NoGradGuard no_grad;
    reset_peak_memory_stats();
    model(x);
    EXPECT_LT(static_cast<double>(max_memory_allocated() - before),
              (2 + kCopies) * unit);
  };
  expect_kept(true, 0);
  expect_kept(2, units / 2);
  expect_kept(4, 0);
  expect_kept(false, units - 2 * unit);  // two had memory from the step before
}

}  // namespace
}  // namespace lockstep::internal
