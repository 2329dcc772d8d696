// The memory that checkpointing needs, in bytes of LibTorch's CPU allocator.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/metrics/memory_stats.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"

namespace lockstep::internal {
namespace {

// Without checkpointing, N blocks of K layers keep N K activations. With it,
// forward keeps the inputs of N blocks, and backward has the K activations of
// one block beside them.
TEST(CheckpointingMemory, InputsOfAllBlocksAndActivationsOfOne) {
  record_memory_stats();
  constexpr int kBlocks = 12;
  constexpr int kLayers = 12;
  constexpr int64_t kRows = 4096;
  constexpr int64_t kWidth = 16;
  constexpr double kActivation = kRows * kWidth * sizeof(float);

  std::vector<torch::nn::Sequential> blocks;
  for (int i = 0; i < kBlocks; ++i) {
    torch::nn::Sequential block;
    for (int j = 0; j < kLayers; ++j) {
      block->push_back(torch::nn::Linear(kWidth, kWidth));
      block->push_back(torch::nn::Tanh());
    }
    for (auto& parameter : block->parameters()) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    blocks.push_back(block);
  }
  const auto input = torch::ones({kRows, kWidth});
  const auto peak_with = [&](auto&& call) {
    reset_peak_memory_stats();
    const int64_t before = memory_allocated();
    auto x = (input * 1).requires_grad_();
    for (auto& block : blocks) x = call(block, x);
    x.sum().backward();
    return static_cast<double>(max_memory_allocated() - before);
  };
  const auto plain = peak_with(
      [](auto& block, const torch::Tensor& x) { return block->forward(x); });
  EXPECT_NEAR(plain / (kBlocks * kLayers * kActivation), 1, 0.15);
  const auto peak = peak_with(
      [](auto& block, const torch::Tensor& x) { return checkpoint(block, x); });
  EXPECT_NEAR(peak / ((kBlocks + kLayers) * kActivation), 1, 0.15);
}

}  // namespace
}  // namespace lockstep::internal
