#include "lockstep/comm/shm/protocol/common_memory.h"

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::shm {
namespace {

constexpr uint8_t kYes = 1;

milliseconds left_of(const Deadline& deadline) {
  return std::max(deadline.remaining(), milliseconds(1));
}

// Allocates rank 0's memory and returns where it lies. If that fails, the
// region is 0 and `trouble` says why.
RegisteredMemory::Place lend(Core& core, void*& owned, size_t bytes,
                             std::string& trouble) {
  try {
    owned = core.registered.allocate(bytes);
    // The peers have read their sockets just before, so there was room.
    if (const auto place = core.registered.find(owned, bytes)) return *place;
    trouble = "the socket to a peer is full";
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  return {.region = 0, .offset = 0};
}

}  // namespace

CommonMemory::CommonMemory(Group& group, size_t bytes,
                           std::chrono::milliseconds timeout)
    : group_(group) {
  auto& core = group.core();
  const auto deadline = Deadline::after(timeout);
  auto left = [&] { return left_of(deadline); };
  const Collective::What what{.operation = CollectiveKind::memory_in_common,
                              .dtype = DType::uint8,
                              .agreed = bytes};
  std::string trouble;
  uint8_t well = kYes;
  try {
    core.registered.look();
  } catch (const std::exception& error) {
    trouble = error.what();
    well = 0;
  }
  try {
    gather_all(core, what, well, left());
    RegisteredMemory::Place place{.region = 0, .offset = 0};
    if (core.rank == 0 && well == kYes) {
      place = lend(core, owned_, bytes, trouble);
    }
    place = gather_all(core, what, place, left())[0];
    if (place.region == 0) {
      well = 0;
      if (core.rank != 0)
        trouble = core.waiting.name(0) + " could not allocate them";
    }
    if (well == kYes) {
      try {
        data_ = core.registered.reach(0, place, bytes);
      } catch (const std::exception& error) {
        trouble = "the memory of " + core.waiting.name(0) +
                  " cannot be reached: " + error.what();
        well = 0;
      }
    }
    const auto all = gather_all(core, what, well, left());
    const auto without = std::ranges::find(all, uint8_t{0});
    if (without != all.end()) {
      if (trouble.empty()) {
        trouble = core.waiting.name(static_cast<int>(without - all.begin())) +
                  " cannot map them";
      }
      throw Unavailable(std::to_string(bytes) +
                        " bytes of memory in common cannot be had: " + trouble);
    }
  } catch (...) {
    if (owned_ != nullptr) core.registered.free(owned_);
    throw;
  }
}

CommonMemory::~CommonMemory() {
  if (owned_ != nullptr) group_.free_registered(owned_);
}

namespace {

size_t announced_bytes(Group& group, milliseconds timeout) {
  Collective call(group.core(),
                  {.operation = CollectiveKind::split_barrier,
                   .dtype = DType::uint8,
                   .agreed = 0},
                  timeout);
  call.announce(0);
  call.wait_for_all();
  return group.size() * kCacheLine;
}

}  // namespace

Arrivals::Arrivals(Group& group, milliseconds timeout)
    : Arrivals(group, Deadline::after(timeout)) {}

// The braces make the size, which waits for the peers, be evaluated first.
Arrivals::Arrivals(Group& group, const Deadline& deadline)
    : group_(group),
      memory_{group, announced_bytes(group, left_of(deadline)),
              left_of(deadline)} {}

std::atomic<uint64_t>& Arrivals::arrivals(int rank) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(memory_.data() +
                                                   rank * kCacheLine);
}

void Arrivals::arrive() noexcept {
  group_.core().standstill.thread_comes();
  // Pairs with the loads in wait().
  arrivals(group_.rank()).store(++own_, std::memory_order_seq_cst);
  group_.core().waiting.wake_sleepers();
}

void Arrivals::wait(milliseconds timeout) {
  if (waited_for_ == own_) return;
  auto& core = group_.core();
  auto missing = [&](std::memory_order order) {
    uint64_t ranks = 0;
    for (int peer = 0; peer < core.size; ++peer) {
      if (arrivals(peer).load(order) < own_) ranks |= uint64_t{1} << peer;
    }
    return ranks;
  };
  if (!core.waiting.spin(
          [&](std::memory_order order) { return missing(order) == 0; })) {
    Patience patience(timeout);
    core.sleep(patience, missing, [&](uint64_t ranks) {
      return core.complain(ranks, [&](int peer) {
        return "has arrived " +
               std::to_string(arrivals(peer).load(std::memory_order_relaxed)) +
               " of " + std::to_string(own_) +
               " times at the end of a step that shares parameters";
      });
    });
  }
  waited_for_ = own_;
}

}  // namespace lockstep::internal::shm
