#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "lockstep/comm/shm/protocol/common_memory.h"

namespace lockstep::shm {

// A barrier in two halves: each rank counts its arrivals on a cache line of its
// own, and reads those of the others.
//
// Making it is a collective of the group (errors as CommonMemory's). The group
// must outlive it. Threads: one at a time, beside the group's collectives.
class Arrivals {
 public:
  Arrivals(Group& group, std::chrono::milliseconds timeout);

  // One release store; never blocks, throws nothing.
  void arrive() noexcept;
  // Until every rank has arrived as often as this one. Throws GroupBroken as
  // the group's collectives.
  void wait(std::chrono::milliseconds timeout);

 private:
  std::atomic<uint64_t>& arrivals(int rank) const;

  Group& group_;
  CommonMemory memory_;
  uint64_t own_ = 0;
  uint64_t waited_for_ = 0;
};

}  // namespace lockstep::shm
