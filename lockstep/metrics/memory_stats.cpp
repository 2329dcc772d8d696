#include "lockstep/metrics/memory_stats.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <array>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "lockstep/base/no_destructor.h"
#include "lockstep/base/shared_memory.h"

namespace lockstep {
namespace {

using internal::ByteCount;
using internal::SharedMemory;

// A tensor's memory is its own context, as LibTorch wants it of the CPU
// allocator (raw_allocate()), so its size is nowhere but in the memory itself:
// in its last bytes, as malloc_usable_size() gives them. Memory from before
// record_memory_stats(), which may be freed here as well, has no such mark.
struct SizeMark {
  uint64_t mark;
  uint64_t bytes;
};
static_assert(sizeof(SizeMark) == 16);

uint64_t mark_of(const void* data) {
  constexpr uint64_t kMark = 0x9d5c0b1f6ae37248;
  return kMark ^ reinterpret_cast<uintptr_t>(data);
}

std::byte* place_of_mark(void* data) {
  const size_t usable = ::malloc_usable_size(data);
  if (usable < sizeof(SizeMark)) return nullptr;
  return static_cast<std::byte*>(data) + usable - sizeof(SizeMark);
}

class CountedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A size for which there is no room with the mark fails without it, too.
    const bool marked = bytes > 0 && bytes <= SIZE_MAX - sizeof(SizeMark);
    void* const memory =
        torchs().raw_allocate(marked ? bytes + sizeof(SizeMark) : bytes);
    if (marked) {
      const SizeMark mark{mark_of(memory), bytes};
      std::memcpy(place_of_mark(memory), &mark, sizeof mark);
      count_.add(static_cast<int64_t>(bytes));
    }
    return {memory, memory, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    torchs().copy_data(to, from, bytes);
  }

  ByteCount& count() { return count_; }

  // Never destroyed, because static tensors outlive everything.
  static CountedAllocator& instance() {
    static internal::NoDestructor<CountedAllocator> allocator;
    return *allocator;
  }
  static c10::Allocator& torchs() { return *c10::GetDefaultCPUAllocator(); }

 private:
  static void free_counted(void* data) {
    if (data == nullptr) return;
    if (auto* const place = place_of_mark(data)) {
      SizeMark mark;
      std::memcpy(&mark, place, sizeof mark);
      if (mark.mark == mark_of(data)) {
        // malloc may give the same memory for something that is not counted.
        std::memset(place, 0, sizeof mark);
        instance().count_.remove(static_cast<int64_t>(mark.bytes));
      }
    }
    torchs().raw_deallocate(data);
  }

  ByteCount count_;
};

// Null before record_memory_stats().
std::atomic<ByteCount*> counted{nullptr};

ByteCount& counted_bytes() {
  auto* const count = counted.load(std::memory_order_acquire);
  if (count != nullptr) return *count;
  throw std::logic_error(
      "memory_allocated, max_memory_allocated: nothing was counted; call "
      "record_memory_stats() at the beginning of main()");
}

}  // namespace

void record_memory_stats() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (counted.load(std::memory_order_relaxed) != nullptr) return;
  auto& allocator = CountedAllocator::instance();
  if (c10::GetCPUAllocator() == &CountedAllocator::torchs()) {
    // The same priority as LibTorch's own, so that the arenas of gradients,
    // which come later, can be put in front of this allocator.
    c10::SetCPUAllocator(&allocator);
  }
  if (c10::GetCPUAllocator() != &allocator) {
    throw std::logic_error(
        "record_memory_stats: LibTorch's CPU allocator was replaced before; "
        "call it at the beginning of main(), before a DistributedDataParallel "
        "or FullyShard is constructed");
  }
  counted.store(&allocator.count(), std::memory_order_release);
}

int64_t memory_allocated() { return counted_bytes().used(); }
int64_t max_memory_allocated() { return counted_bytes().peak(); }

int64_t shared_memory_allocated() { return SharedMemory::made().used(); }
int64_t max_shared_memory_allocated() { return SharedMemory::made().peak(); }

void reset_peak_memory_stats() {
  if (auto* const count = counted.load(std::memory_order_acquire)) {
    count->reset_peak();
  }
  SharedMemory::made().reset_peak();
}

}  // namespace lockstep
