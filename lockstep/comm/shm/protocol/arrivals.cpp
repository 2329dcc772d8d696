#include "lockstep/comm/shm/protocol/arrivals.h"

#include <string>

#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::shm {
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
    : group_(group), memory_(group, announced_bytes(group, timeout), timeout) {}

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
      std::string absent;
      for (int peer = 0; peer < core.size; ++peer) {
        if ((ranks >> peer & 1) == 0) continue;
        absent +=
            (absent.empty() ? "" : ", ") + core.waiting.name(peer) +
            " has arrived " +
            std::to_string(arrivals(peer).load(std::memory_order_relaxed)) +
            " of " + std::to_string(own_) +
            " times at the end of a step that shares parameters" +
            core.last_call_of(peer);
      }
      return absent;
    });
  }
  waited_for_ = own_;
}

}  // namespace lockstep::internal::shm
