#include "lockstep/metrics/memory_stats.h"

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// These checks come before the first call of record_memory_stats(), which is
// for the whole process.
struct BeforeRecording {
  void* memory = c10::GetCPUAllocator()->raw_allocate(1 << 20);
  at::Tensor tensor = torch::ones({1000});
  std::string asked = message_of([] { memory_allocated(); });
  std::string over_another = message_of([] {
    struct Other final : c10::Allocator {
      c10::DataPtr allocate(size_t bytes) override {
        return c10::GetDefaultCPUAllocator()->allocate(bytes);
      }
      void copy_data(void* to, const void* from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
      }
    };
    static Other other;
    c10::SetCPUAllocator(&other, /*priority=*/0);
    record_memory_stats();
  });
  BeforeRecording() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator()); }
};
BeforeRecording before_recording;

TEST(MemoryStats, BytesAreExact) {
  record_memory_stats();
  const int64_t before = memory_allocated();
  {
    const auto floats = torch::empty({1001});
    EXPECT_EQ(memory_allocated() - before, 1001 * 4);
    auto bytes = torch::zeros({3}, at::kByte);
    EXPECT_EQ(memory_allocated() - before, 1001 * 4 + 3);
    bytes.resize_({1'000'000});
    EXPECT_EQ(memory_allocated() - before, 1001 * 4 + 1'000'000);
    const auto view = floats.view({7, 143});
    const auto nothing = torch::empty({0});
    EXPECT_EQ(memory_allocated() - before, 1001 * 4 + 1'000'000);
  }
  EXPECT_EQ(memory_allocated(), before);
}

TEST(MemoryStats, ThePeakIsTheMostSinceItWasReset) {
  record_memory_stats();
  const int64_t before = memory_allocated();
  torch::empty({1000}, at::kByte);
  reset_peak_memory_stats();
  EXPECT_EQ(max_memory_allocated(), before);
  {
    const auto kept = torch::empty({500}, at::kByte);
    { const auto freed = torch::empty({300}, at::kByte); }
    { const auto freed = torch::empty({200}, at::kByte); }
    EXPECT_EQ(max_memory_allocated() - before, 800);
    reset_peak_memory_stats();
    EXPECT_EQ(max_memory_allocated() - before, 500);
  }
  EXPECT_EQ(max_memory_allocated() - before, 500);
}

// Kernels that allocate by raw_allocate() free the memory by the allocator that
// is set when they end.
TEST(MemoryStats, RawMemoryIsCountedToo) {
  record_memory_stats();
  auto* const allocator = c10::GetCPUAllocator();
  const int64_t before = memory_allocated();
  void* const memory = allocator->raw_allocate(12345);
  EXPECT_EQ(memory_allocated() - before, 12345);
  auto data = allocator->allocate(100);
  EXPECT_TRUE(allocator->is_simple_data_ptr(data));
  EXPECT_EQ(data.get_deleter(), allocator->raw_deleter());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0U);
  allocator->raw_deallocate(memory);
  data.clear();
  EXPECT_EQ(memory_allocated(), before);
  allocator->raw_deallocate(allocator->raw_allocate(0));
  allocator->raw_deallocate(nullptr);
  EXPECT_EQ(memory_allocated(), before);
}

TEST(MemoryStats, MemoryFromBeforeIsNeverCounted) {
  record_memory_stats();
  const int64_t before = memory_allocated();
  c10::GetCPUAllocator()->raw_deallocate(before_recording.memory);
  before_recording.tensor.reset();
  EXPECT_EQ(memory_allocated(), before);
}

// malloc gives memory that was counted once for something that is not counted,
// where it may still have the old size at its end.
TEST(MemoryStats, MemoryThatIsUsedAgainIsNotFreedTwice) {
  record_memory_stats();
  auto* const allocator = c10::GetCPUAllocator();
  const int64_t before = memory_allocated();
  for (const size_t bytes : {100, 1000, 10'000, 100'000}) {
    allocator->raw_deallocate(allocator->raw_allocate(bytes));
    allocator->raw_deallocate(
        c10::GetDefaultCPUAllocator()->raw_allocate(bytes + 16));
    EXPECT_EQ(memory_allocated(), before) << bytes;
  }
}

TEST(MemoryStats, ThreadsAllocateAndFreeForEachOther) {
  record_memory_stats();
  const int64_t before = memory_allocated();
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  std::vector<std::vector<at::Tensor>> made(kThreads);
  const auto on_threads = [](auto body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
    for (auto& thread : threads) thread.join();
  };
  on_threads([&](int i) {
    for (int k = 0; k < kEach; ++k) {
      made[i].push_back(torch::empty({k + 1}, at::kByte));
    }
  });
  constexpr int64_t kAll = kThreads * kEach * (kEach + 1) / 2;
  EXPECT_EQ(memory_allocated() - before, kAll);
  EXPECT_GE(max_memory_allocated() - before, kAll);
  on_threads([&](int i) { made[(i + 1) % kThreads].clear(); });
  EXPECT_EQ(memory_allocated(), before);
}

TEST(MemoryStats, MistakesAreOneLine) {
  EXPECT_THAT(before_recording.asked,
              HasSubstr("call record_memory_stats() at the beginning"));
  EXPECT_THAT(before_recording.over_another,
              HasSubstr("CPU allocator was replaced before"));
}

// Memory that ranks share is in the count of the rank that has made it: each
// its own, and rank 0 what the ranks have in common.
WORLD_TEST(MemoryStats, SharedMemoryIsCountedByTheRankThatMadeIt, 1, 3) {
  auto group = init_process_group("lockstep");
  record_memory_stats();
  constexpr int64_t kBytes = 3 << 20;
  const auto own_group = new_group();  // has no idle memory
  const int64_t before = shared_memory_allocated();
  const int64_t ordinary = memory_allocated();
  reset_peak_memory_stats();
  {
    const auto own = empty_shared({kBytes}, at::kByte, own_group);
    // Alone there is nobody to share with.
    const bool shares = is_shared(own, own_group);
    EXPECT_EQ(shared_memory_allocated() - before, shares ? kBytes : 0);
    EXPECT_EQ(memory_allocated() - ordinary, shares ? 0 : kBytes);
  }
  if (world.size > 1) {
    auto* const sharing = host_sharing(own_group);
    ASSERT_NE(sharing, nullptr);
    const auto common =
        sharing->zeros_in_common(2 * kBytes, at::kByte, group->timeout());
    EXPECT_EQ(max_shared_memory_allocated() - before,
              world.rank == 0 ? 2 * kBytes : kBytes);
  }
}

}  // namespace
}  // namespace lockstep::internal
