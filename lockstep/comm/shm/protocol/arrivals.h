#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "lockstep/comm/shm/protocol/common_memory.h"

namespace lockstep::internal::shm {

// A barrier in two halves: each rank counts its arrivals on a cache line of its
// own, and reads those of the others.
//
// Constructing it is a collective of the group, with the errors of
// CommonMemory. The group must outlive it. Threads: one at a time, also while
// another thread is in a collective of the group.
class Arrivals {
 public:
  Arrivals(Group& group, std::chrono::milliseconds timeout);

  // Counts one arrival of this rank, by one release store. Never blocks, throws
  // nothing.
  void arrive() noexcept;
  // Waits until every rank has arrived as often as this one. Throws GroupBroken
  // as the group's collectives do.
  void wait(std::chrono::milliseconds timeout);

 private:
  std::atomic<uint64_t>& arrivals(int rank) const;

  Group& group_;
  CommonMemory memory_;
  uint64_t own_ = 0;
  uint64_t waited_for_ = 0;
};

}  // namespace lockstep::internal::shm
