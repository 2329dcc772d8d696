// The memory that FullyShard takes, counted by an allocator: that of the shards
// and of one or two units.

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;
using torch::nn::Linear;

// Passes allocations on and counts their bytes. Its pointers are their own
// context, as LibTorch wants it of the allocator for CPUs.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto data = next_->allocate(bytes);
    void* const place = data.release_context();
    if (place == nullptr) return data;
    const std::lock_guard lock(mutex_);
    sizes_[place] = static_cast<int64_t>(bytes);
    used_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, used_);
    return {place, place, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    next_->copy_data(to, from, bytes);
  }

  int64_t used() const {
    const std::lock_guard lock(mutex_);
    return used_;
  }
  // Returns the most bytes since the last call.
  int64_t take_peak() {
    const std::lock_guard lock(mutex_);
    return std::exchange(peak_, used_);
  }
  static CountingAllocator& instance() {
    static auto* const allocator = [] {
      auto* made = new CountingAllocator;  // lives as long as its memory
      c10::SetCPUAllocator(made, /*priority=*/100);
      return made;
    }();
    return *allocator;
  }

 private:
  static void free_counted(void* place) {
    auto& counter = instance();
    {
      const std::lock_guard lock(counter.mutex_);
      const auto found = counter.sizes_.find(place);
      counter.used_ -= found->second;
      counter.sizes_.erase(found);
    }
    counter.next_->raw_deallocate(place);
  }

  c10::Allocator* const next_ = c10::GetCPUAllocator();
  mutable std::mutex mutex_;
  std::map<void*, int64_t> sizes_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

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
  auto& memory = CountingAllocator::instance();
  const int64_t before = memory.used();
  memory.take_peak();
  torch::manual_seed(1);
  const FullyShardOptions options{};
  FullyShard<Tower> model([&] { return Tower(options); }, options);
  const double shards = kLayers * kLayerBytes / static_cast<double>(world.size);
  const double unit = kLayerBytes;
  // Construction: all shards and one unit.
  EXPECT_NEAR(static_cast<double>(memory.take_peak() - before), shards + unit,
              0.15 * (shards + unit));
  EXPECT_NEAR(static_cast<double>(memory.used() - before), shards,
              0.15 * shards);

  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.01).momentum(0.9));
  const auto x = torch::randn({2, kSide});
  const auto counted = [&] {
    return static_cast<double>(memory.take_peak() - before);
  };
  // LibTorch's Gloo makes copies: of what it gathers, and of what it reduces,
  // with the result.
  const double copied = unit;
  const double reduced = unit + unit / world.size;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    memory.take_peak();
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

}  // namespace
}  // namespace lockstep::internal
