#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// Returns from how many bytes on gradients are allocated in arenas: 64 KiB, as
// for smaller ones a copy costs less. LOCKSTEP_PLACED_BYTES names another
// number (for tests), the same for all ranks.
size_t placed_bytes();

// Memory that the ranks of a host share, from which backward allocates large
// gradients. The ranks then reduce them where they are, and no rank copies its
// gradients into buckets. Which allocation becomes which gradient does not
// matter: at the end each rank says where its gradient of a parameter lies, if
// it lies here.
//
// For that the process's CPU allocator (c10::SetCPUAllocator()) is replaced,
// when the first arena is made and for good, by one that passes on everything
// else to the allocator before. If a program has set one of higher priority,
// nothing lies here.
//
// Memory is given back when its tensor is freed, by any thread; it may outlive
// this object's owner and the group. Only the thread that has armed an arena
// allocates from it. Otherwise for one thread.
class GradientArena : public std::enable_shared_from_this<GradientArena> {
 public:
  // Has one block of each of these sizes in bytes, in memory from
  // empty_shared(). Returns null if that is not memory that ranks share.
  static std::shared_ptr<GradientArena> make(const std::vector<size_t>& sizes,
                                             const ProcessGroupPtr& group);
  GradientArena(const GradientArena&) = delete;

  // uint8 [bytes]
  const at::Tensor& memory() const { return memory_; }

  // From now on allocations of this thread that have the size of a free block
  // get one. Another arena that this thread has armed is no longer used.
  void arm();
  void disarm() noexcept;

  // Returns the offset in memory() of the block in use that begins at `data`
  // and has this size, if there is one.
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const;

 private:
  friend class ArenaAllocator;
  explicit GradientArena(at::Tensor memory) : memory_(std::move(memory)) {}
  // Returns a free block of this size, or null.
  std::byte* take(size_t bytes);
  void give_back(std::byte* block);

  const ProcessMark made_in_{};
  const at::Tensor memory_;
  std::atomic<bool> armed_{false};
  mutable std::mutex mutex_;
  std::map<size_t, std::vector<std::byte*>> free_;  // by size
  std::map<const std::byte*, size_t> used_;         // sizes by block
};

}  // namespace lockstep::internal
