// The memory that checkpointing needs, in bytes of LibTorch's CPU allocator.

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint.h"

namespace lockstep::internal {
namespace {

// Counts what it passes on to the allocator before.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* next) : next_(next) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>(next_->allocate(bytes), bytes, this);
    auto* data = block->memory.get();
    const auto now = live_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_.load(), now);
    return {data, block.release(), &free_block, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source,
                 std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  // Returns how many bytes more than now were allocated at once in `body`.
  template <typename Body>
  int64_t peak_of(const Body& body) {
    const int64_t before = live_;
    peak_ = before;
    body();
    return peak_ - before;
  }

 private:
  struct Block {
    Block(c10::DataPtr memory_of, size_t bytes_of, CountingAllocator* owner_of)
        : memory(std::move(memory_of)), bytes(bytes_of), owner(owner_of) {}
    c10::DataPtr memory;
    size_t bytes;
    CountingAllocator* owner;
  };
  static void free_block(void* pointer) {
    const std::unique_ptr<Block> block(static_cast<Block*>(pointer));
    block->owner->live_ -= static_cast<int64_t>(block->bytes);
  }

  c10::Allocator* const next_;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};
};

CountingAllocator& counting_allocator() {
  static auto& allocator = []() -> CountingAllocator& {
    static CountingAllocator made(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&made, /*priority=*/100);
    return made;
  }();
  return allocator;
}

// Without checkpointing, N blocks of K layers keep N K activations. With it,
// forward keeps the inputs of N blocks, and backward has the K activations of
// one block beside them.
TEST(CheckpointingMemory, InputsOfAllBlocksAndActivationsOfOne) {
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
  auto& allocator = counting_allocator();
  const auto input = torch::ones({kRows, kWidth});
  const auto peak_with = [&](auto&& call) {
    return static_cast<double>(allocator.peak_of([&] {
      auto x = (input * 1).requires_grad_();
      for (auto& block : blocks) x = call(block, x);
      x.sum().backward();
    }));
  };
  const auto plain = peak_with(
      [](auto& block, const torch::Tensor& x) { return block->forward(x); });
  EXPECT_NEAR(plain / (kBlocks * kLayers * kActivation), 1, 0.15);
  for (bool use_reentrant : {false, true}) {
    const auto peak = peak_with([&](auto& block, const torch::Tensor& x) {
      return checkpoint({.use_reentrant = use_reentrant}, block, x);
    });
    EXPECT_NEAR(peak / ((kBlocks + kLayers) * kActivation), 1, 0.15)
        << use_reentrant;
  }
}

}  // namespace
}  // namespace lockstep::internal
