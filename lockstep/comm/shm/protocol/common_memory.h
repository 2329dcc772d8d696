#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

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

}  // namespace lockstep::internal::shm
