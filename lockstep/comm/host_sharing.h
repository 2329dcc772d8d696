#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

// A barrier in two halves, so that what lies between them hides the wait.
// Threads: one at a time.
class SplitBarrier {
 public:
  virtual ~SplitBarrier() = default;
  // One release store: what this rank wrote before is seen by every rank whose
  // wait() for this arrival has returned. Each arrival but the first must
  // come behind the wait() for the one before.
  virtual void arrive() = 0;
  // Until every rank has arrived as often as this one. Returns at once if this
  // rank has waited for its last arrival already, or never arrived. Throws
  // c10::DistBackendError that names who did not come.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
};

// What a c10d::Backend whose ranks all share one host's memory also is.
//
// All functions but shares() are collective, like any collective of the group:
// in the same order on all ranks, with arguments that agree (else all ranks
// throw c10::DistBackendError with both descriptions). What they return
// belongs to its rank, keeps the group's memory alive, and is of no use once
// the group was aborted or destroyed (its waits throw).
class HostSharing {
 public:
  // Reduces `buckets`, contiguous CPU tensors of the floating dtypes that the
  // kernels have (std::invalid_argument for others), without records and
  // numbers: make_bucket_reduction() adds them. nullptr on all ranks if some
  // bucket of some rank is not its own memory of empty_shared() (which falls
  // back to ordinary memory without a word), or cannot be reached by another
  // rank (out of descriptors, say). `timeout`: of this, and of each wait in
  // begin() and finish().
  virtual std::unique_ptr<BucketReduction> reduce_buckets(
      std::vector<ReducedBucket> buckets, Results results,
      std::chrono::milliseconds timeout) = 0;

  // `timeout`: of this.
  virtual std::unique_ptr<SplitBarrier> split_barrier(
      std::chrono::milliseconds timeout) = 0;

  // One piece of zeroed memory that all ranks read and write: [count].
  // Unlike empty_shared(), which gives each rank its own. `options`: dtype.
  // Throws c10::DistBackendError on all ranks if one cannot have it. Tensors
  // may outlive the group. For collectives it is like any other memory, and
  // must not be what they write on more than one rank.
  virtual at::Tensor zeros_in_common(int64_t count,
                                     const at::TensorOptions& options,
                                     std::chrono::milliseconds timeout) = 0;

  // Whether [data, data + bytes) lies in one tensor of allocateTensor() or
  // zeros_in_common(). Any thread.
  virtual bool shares(const void* data, size_t bytes) const = 0;

 protected:
  // Owned as a backend.
  ~HostSharing() = default;
};

// Whether lists of tensors of any sizes and dtypes are one operation of
// `backend`, as they are in shared memory (allgather() takes sizes that differ,
// allreduce_coalesced() and allgather_coalesced() dtypes that differ; sparse
// tensors are averaged, too). Then what one user call becomes is compared as a
// whole, and ends on all ranks at the same tensor if they disagree.
bool takes_lists_at_once(const c10d::Backend& backend);

// Of the group's CPU backend (none given: the default group's), whose it stays:
// not for longer than the group is used; nullptr where its ranks are of several
// hosts or it has no shared memory. The same on all ranks.
HostSharing* host_sharing(const ProcessGroupPtr& group);

}  // namespace lockstep
