#include "lockstep/parallel/ddp/gradient_arena.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <unordered_map>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/comm/empty_shared.h"

namespace lockstep::internal {
namespace {

// LibTorch's own alignment of CPU memory (c10::gAlignment), and a cache line.
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

size_t placed_bytes() {
  static const auto bytes = static_cast<size_t>(
      get_env_int("LOCKSTEP_PLACED_BYTES", 1, int64_t{1} << 40)
          .value_or(int64_t{64} << 10));
  return bytes;
}

class ArenaAllocator final : public c10::Allocator {
 public:
  static ArenaAllocator& installed() {
    // Never destroyed, because static tensors outlive everything.
    static auto* const allocator = [] {
      auto* made = new ArenaAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made);
      return made;
    }();
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const auto& arena = armed_here();
    if (arena && arena->armed_.load(std::memory_order_relaxed)) {
      if (auto* block = arena->take(bytes)) {
        const std::lock_guard lock(mutex_);
        blocks_[block] = arena;
        // raw_allocate() relies on it that context and data are the same.
        return {block, block, &give_back, c10::Device(c10::kCPU)};
      }
    }
    return before_->allocate(bytes);
  }
  // raw_allocate() may have given a block.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }

  static std::shared_ptr<GradientArena>& armed_here() {
    // Never destroyed: static objects allocate after the thread's objects end.
    thread_local auto& arena = *new std::shared_ptr<GradientArena>();
    return arena;
  }

 private:
  explicit ArenaAllocator(c10::Allocator* before) : before_(before) {}

  static void give_back(void* data) {
    auto& self = installed();
    std::shared_ptr<GradientArena> arena;
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.blocks_.find(data);
      if (found != self.blocks_.end()) {
        arena = std::move(found->second);
        self.blocks_.erase(found);
      }
    }
    if (arena) {
      arena->give_back(static_cast<std::byte*>(data));
    } else {
      self.before_->raw_deleter()(data);
    }
  }

  c10::Allocator* const before_;
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<GradientArena>> blocks_;  // in use
};

std::shared_ptr<GradientArena> GradientArena::make(
    const std::vector<size_t>& sizes, const ProcessGroupPtr& group) {
  size_t total = 0;
  for (const size_t size : sizes) total += aligned(size);
  const auto memory = empty_shared({static_cast<int64_t>(total)},
                                   at::TensorOptions(at::kByte), group);
  if (!is_shared(memory, group)) return nullptr;
  ArenaAllocator::installed();
  std::shared_ptr<GradientArena> arena(new GradientArena(memory));
  auto* at = static_cast<std::byte*>(memory.mutable_data_ptr());
  for (const size_t size : sizes) {
    arena->free_[size].push_back(at);
    at += aligned(size);
  }
  return arena;
}

void GradientArena::arm() {
  armed_.store(true, std::memory_order_relaxed);
  ArenaAllocator::armed_here() = shared_from_this();
}

void GradientArena::disarm() noexcept {
  armed_.store(false, std::memory_order_relaxed);
  // The thread must not keep the memory.
  auto& here = ArenaAllocator::armed_here();
  if (here.get() == this) here.reset();
}

std::optional<uint64_t> GradientArena::offset_of(const void* data,
                                                 size_t bytes) const {
  const auto* block = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(block);
  if (found == used_.end() || found->second != bytes) return std::nullopt;
  return block - static_cast<const std::byte*>(memory_.const_data_ptr());
}

std::byte* GradientArena::take(size_t bytes) {
  if (made_in_.is_foreign()) return nullptr;  // the parent may use the block
  const std::lock_guard lock(mutex_);
  const auto found = free_.find(bytes);
  if (found == free_.end() || found->second.empty()) return nullptr;
  auto* block = found->second.back();
  found->second.pop_back();
  used_[block] = bytes;
  return block;
}

void GradientArena::give_back(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(block);
  free_[found->second].push_back(block);
  used_.erase(found);
}

}  // namespace lockstep::internal
