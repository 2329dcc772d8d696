#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

namespace lockstep::shm {

class Group;

// One piece of zeroed memory that all ranks of a group map: rank 0's registered
// memory. What they write there they order themselves.
//
// Making it is a collective of the group: the same number of bytes (more than
// 0) on all ranks, else all throw CallMismatch. Throws Unavailable on all ranks
// if one of them cannot have it; GroupBroken. Blocks for `timeout` at most.
//
// The object must not outlive the group, but may outlive Group::leave() and the
// other ranks' objects: each keeps the memory. Threads: the data is anybody's.
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

}  // namespace lockstep::shm
