#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::shm {

class Group;

// One piece of zeroed memory that all ranks of a group map. It is rank 0's
// registered memory. The ranks must put their accesses to it in order
// themselves.
//
// Constructing it is a collective of the group: all ranks give the same number
// of bytes (more than 0), otherwise all throw CallMismatch. Throws Unavailable
// on all ranks if one of them cannot have the memory, and GroupBroken. Blocks
// for `timeout` at most.
//
// The object must not outlive the group. It may outlive Group::leave() and the
// other ranks' objects, each of which keeps the memory. Threads: any thread may
// use the data.
class CommonMemory {
 public:
  CommonMemory(Group& group, size_t bytes, std::chrono::milliseconds timeout);
  CommonMemory(const CommonMemory&) = delete;
  CommonMemory& operator=(const CommonMemory&) = delete;
  ~CommonMemory();

  // Begins at a multiple of 4,096 bytes.
  std::byte* data() const { return data_.get(); }

 private:
  Group& group_;
  void* owned_ = nullptr;  // rank 0's
  std::shared_ptr<std::byte> data_{};
};

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
  Arrivals(Group& group, const Deadline& deadline);
  std::atomic<uint64_t>& arrivals(int rank) const;

  Group& group_;
  CommonMemory memory_;
  uint64_t own_ = 0;
  uint64_t waited_for_ = 0;
};

}  // namespace lockstep::internal::shm
