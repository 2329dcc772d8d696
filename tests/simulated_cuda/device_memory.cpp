#include "tests/simulated_cuda/device_memory.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/simulated_cuda/device_interface.h"
#include "tests/simulated_cuda/scheduler.h"
#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

constexpr size_t kAddresses = size_t{1} << 36U;  // of a device; not all memory
constexpr size_t kRounding = 512;                // as CUDA's allocator
constexpr int kNotNumber = 0xff;  // every floating-point type reads it as NaN

std::byte* map_addresses(int protection) {
  void* const range = mmap(nullptr, kAddresses, protection,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(range != MAP_FAILED,
              "simulated device: mmap: ", std::strerror(errno));
  return static_cast<std::byte*>(range);
}

struct Block {
  std::byte* address;
  size_t size;
  c10::StreamId stream;               // that allocated it
  std::set<c10::StreamId> used_by{};  // other streams, from record_stream()
};

// The memory of one device.
class Arena {
 public:
  explicit Arena(c10::DeviceIndex device)
      : device_(device),
        addresses_(map_addresses(PROT_NONE)),
        contents_(map_addresses(PROT_READ | PROT_WRITE)) {}

  bool holds(const void* address) const {
    return address >= addresses_ && address < addresses_ + kAddresses;
  }
  std::byte* contents(const void* address) const {
    return contents_ + (static_cast<const std::byte*>(address) - addresses_);
  }
  std::byte* allocate(size_t bytes, const c10::Stream& stream);
  void free(std::byte* address);
  void record_stream(std::byte* address, const c10::Stream& stream);
  void empty_cache();
  c10::CachingDeviceAllocator::DeviceStats statistics();

 private:
  using Free = std::multimap<size_t, Block>;  // by size

  static std::optional<Block> take(Free& blocks, size_t size);
  Block block_for(size_t size, c10::StreamId stream);
  void release_awaited();

  c10::DeviceIndex device_;
  std::byte* addresses_;
  std::byte* contents_;
  std::mutex mutex_;
  size_t used_ = 0;
  std::unordered_map<std::byte*, Block> live_;
  std::map<c10::StreamId, Free> free_;
  Free unused_;  // of no stream, after empty_cache()
  // Freed blocks that other streams may still use, until these points.
  std::list<std::pair<Block, std::vector<StreamPoint>>> awaited_;
  c10::CachingAllocator::Stat blocks_;
  c10::CachingAllocator::Stat bytes_;
};

std::array<std::atomic<Arena*>, kMostDevices> arenas;

Arena* arena_of(const void* address) {
  for (const auto& arena : arenas) {
    Arena* const found = arena.load(std::memory_order_acquire);
    if (found && found->holds(address)) return found;
  }
  return nullptr;
}

struct sigaction previous_action;
const std::string type_name =
    c10::DeviceTypeName(kDeviceType, /*lower_case=*/true);

// Says what happened, and leaves the rest to the previous action, as the access
// is repeated after this.
void report_segmentation_fault(int signal, siginfo_t* info, void* /*context*/) {
  if (const auto device = device_of(info->si_addr)) {
    std::array<char, 120> text;
    const int length = std::snprintf(
        text.data(), text.size(),
        "simulated device: the host read or wrote memory of %s:%d at %p\n",
        type_name.c_str(), int{*device}, info->si_addr);
    [[maybe_unused]] const auto written =
        write(STDERR_FILENO, text.data(), static_cast<size_t>(length));
  }
  sigaction(signal, &previous_action, nullptr);
}

Arena& arena_of(c10::DeviceIndex device) {
  auto& arena = arenas[static_cast<size_t>(checked_index(device))];
  if (Arena* const found = arena.load(std::memory_order_acquire)) return *found;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  static const bool reports = [] {
    struct sigaction action {};
    action.sa_sigaction = report_segmentation_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &previous_action) == 0;
  }();
  TORCH_CHECK(reports, "simulated device: sigaction failed");
  if (!arena.load()) arena.store(new Arena(device), std::memory_order_release);
  return *arena.load();
}

Arena& arena_with(const void* address) {
  Arena* const arena = arena_of(address);
  TORCH_CHECK(arena, "simulated device: ", address,
              " is not an address of a device");
  return *arena;
}

std::optional<Block> Arena::take(Free& blocks, size_t size) {
  const auto found = blocks.lower_bound(size);
  if (found == blocks.end() || found->first > 2 * size) return {};
  Block block = std::move(found->second);
  blocks.erase(found);
  return block;
}

void Arena::release_awaited() {
  for (auto waiting = awaited_.begin(); waiting != awaited_.end();) {
    const bool reached =
        std::all_of(waiting->second.begin(), waiting->second.end(),
                    [](const StreamPoint& point) {
                      return Scheduler::get().has_reached(point);
                    });
    if (reached) {
      Block& block = waiting->first;
      free_[block.stream].emplace(block.size, std::move(block));
      waiting = awaited_.erase(waiting);
    } else {
      ++waiting;
    }
  }
}

Block Arena::block_for(size_t size, c10::StreamId stream) {
  release_awaited();
  if (auto block = take(free_[stream], size)) return *block;
  if (auto block = take(unused_, size)) return *block;
  TORCH_CHECK_WITH(OutOfMemoryError, size <= kAddresses - used_, kDeviceType,
                   " out of memory: simulated device ", int{device_},
                   " has no range of ", size, " bytes left");
  std::byte* const address = addresses_ + used_;
  used_ += size;
  // A stream that does not wait for the stream of this tensor shall not see
  // zeros, which may look right.
  std::memset(contents(address), kNotNumber, size);
  return {address, size, stream};
}

std::byte* Arena::allocate(size_t bytes, const c10::Stream& stream) {
  const size_t size = (bytes + kRounding - 1) / kRounding * kRounding;
  std::byte* address = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Block block = block_for(size, stream.id());
    address = block.address;
    block.stream = stream.id();
    block.used_by.clear();
    blocks_.increase(1);
    bytes_.increase(block.size);
    live_.emplace(address, std::move(block));
  }
  Scheduler::get().enqueue(stream, [memory = contents(address), size] {
    std::memset(memory, kNotNumber, size);
  });
  return address;
}

void Arena::free(std::byte* address) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end()) {
    std::fprintf(stderr, "simulated device: %p was freed twice\n",
                 static_cast<void*>(address));
    std::abort();
  }
  Block block = std::move(found->second);
  live_.erase(found);
  blocks_.decrease(1);
  bytes_.decrease(block.size);
  if (block.used_by.empty()) {
    free_[block.stream].emplace(block.size, std::move(block));
    return;
  }
  std::vector<StreamPoint> points;
  for (const c10::StreamId stream : block.used_by) {
    points.push_back(Scheduler::get().end_of(stream_of(device_, stream)));
  }
  awaited_.emplace_back(std::move(block), std::move(points));
}

void Arena::record_stream(std::byte* address, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  TORCH_CHECK(found != live_.end(),
              "record_stream: ", static_cast<void*>(address),
              " is not allocated");
  if (stream.id() == found->second.stream) return;
  found->second.used_by.insert(stream.id());
}

void Arena::empty_cache() {
  // Returning memory to CUDA waits for the device, so any stream may have it.
  Scheduler::get().wait_for_device(device_);
  const std::lock_guard lock(mutex_);
  release_awaited();
  for (auto& [stream, blocks] : free_) {
    for (const auto& [size, block] : blocks) {
      std::memset(contents(block.address), kNotNumber, size);
    }
    unused_.merge(blocks);
  }
}

c10::CachingDeviceAllocator::DeviceStats Arena::statistics() {
  const std::lock_guard lock(mutex_);
  c10::CachingDeviceAllocator::DeviceStats statistics;
  statistics.allocation[0] = statistics.active[0] = blocks_;
  statistics.allocated_bytes[0] = statistics.active_bytes[0] = bytes_;
  statistics.reserved_bytes[0].increase(used_);
  return statistics;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_stream(current_device());
    if (bytes == 0) return {nullptr, stream.device()};
    void* const memory =
        arena_of(stream.device_index()).allocate(bytes, stream);
    return {memory, memory, &free, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const c10::Stream stream = current_stream(*device_of(to));
    Scheduler::get().enqueue(
        stream, [to = host_address(to), from = host_address(from), bytes] {
          std::memcpy(to, from, bytes);
        });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (const auto& arena : arenas) {
      if (Arena* const found = arena.load()) found->empty_cache();
    }
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    // As CUDA's allocator, this ignores memory that is not its own.
    if (memory.get() && memory.get_deleter() == &free) {
      auto* const address = static_cast<std::byte*>(memory.get_context());
      arena_with(address).record_stream(address, stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    return arena_of(device).statistics();
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}

 private:
  static void free(void* memory) {
    if (memory) arena_with(memory).free(static_cast<std::byte*>(memory));
  }
};

// Pinned blocks by address. A block lives until the tensor and the copies that
// read or write it are gone.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = std::aligned_alloc(
        kRounding,
        (std::max(bytes, size_t{1}) + kRounding - 1) / kRounding * kRounding);
    TORCH_CHECK(memory, "simulated device: no memory for ", bytes, " bytes");
    // So that what a copy has not written yet does not look right.
    std::memset(memory, kNotNumber, bytes);
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<std::byte*>(memory)] = {
        std::shared_ptr<void>(memory, std::free), bytes};
    return {memory, memory, &free, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::shared_ptr<void> block_of(const void* address) {
    auto* const byte =
        static_cast<std::byte*>(const_cast<void*>(address));  // NOLINT
    const std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(byte);
    if (after == blocks_.begin()) return nullptr;
    const auto& [start, block] = *--after;
    const size_t offset = static_cast<size_t>(byte - start);
    return offset < std::max(block.bytes, size_t{1}) ? block.memory : nullptr;
  }

 private:
  struct Pinned {
    std::shared_ptr<void> memory;
    size_t bytes = 0;
  };
  static void free(void* memory) {
    auto& all = static_cast<PinnedAllocator&>(pinned_allocator());
    const std::lock_guard lock(all.mutex_);
    all.blocks_.erase(static_cast<std::byte*>(memory));
  }

  std::mutex mutex_;
  std::map<std::byte*, Pinned> blocks_;
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* const allocator = new Allocator;
  return *allocator;
}

void* host_address(const void* address) {
  return address ? arena_with(address).contents(address) : nullptr;
}

std::optional<c10::DeviceIndex> device_of(const void* address) {
  for (size_t device = 0; device < arenas.size(); ++device) {
    const Arena* const arena = arenas[device].load(std::memory_order_acquire);
    if (arena && arena->holds(address)) {
      return static_cast<c10::DeviceIndex>(device);
    }
  }
  return {};
}

LiveMemory live_memory() {
  LiveMemory live;
  for (const auto& arena : arenas) {
    if (Arena* const found = arena.load(std::memory_order_acquire)) {
      const auto statistics = found->statistics();
      live.blocks += statistics.allocation[0].current;
      live.bytes += statistics.allocated_bytes[0].current;
    }
  }
  return live;
}

c10::Allocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

std::shared_ptr<void> pinned_block_of(const void* address) {
  return static_cast<PinnedAllocator&>(pinned_allocator()).block_of(address);
}

}  // namespace lockstep::internal::simulated_cuda
