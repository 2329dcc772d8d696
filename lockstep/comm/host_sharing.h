#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// A barrier in two halves, so that the work between them hides the wait.
// Threads: one at a time may call.
class SplitBarrier {
 public:
  virtual ~SplitBarrier() = default;
  // Says that this rank has arrived, by one release store: every rank whose
  // wait() for this arrival has returned sees what this rank wrote before. Each
  // arrival but the first must come after the wait() for the one before.
  virtual void arrive() = 0;
  // Blocks until every rank has arrived as often as this one. Returns at once
  // if this rank has already waited for its last arrival, or never arrived.
  // Throws c10::DistBackendError that names the ranks that did not come.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
};

// The interface of a c10d::Backend whose ranks all share the memory of one
// host.
//
// All functions but shares() are collectives of the group: called in the same
// order on all ranks, with arguments that agree (otherwise all ranks throw
// c10::DistBackendError with both descriptions). What they return belongs to
// its rank and keeps the group's memory alive. It is of no use after the group
// was aborted or destroyed: its waits throw.
class HostSharing {
 public:
  // Makes a reduction of `buckets`, which are contiguous CPU tensors of the
  // floating dtypes that the kernels have (std::invalid_argument for others).
  // Each reduction has a number and a flight record of `group`, to which this
  // backend belongs.
  // `arena` is as in make_bucket_reduction(); if some rank's cannot be reached,
  // nothing moves there.
  // Returns nullptr on all ranks if a bucket of some rank is not that rank's
  // own memory from empty_shared() (which falls back to ordinary memory without
  // an error), or if another rank cannot reach it (it is out of file
  // descriptors, for example). `timeout` is for this call, and for each wait in
  // begin() and finish().
  virtual std::unique_ptr<BucketReduction> reduce_buckets(
      std::vector<ReducedBucket> buckets, Results results,
      const ProcessGroupPtr& group, std::chrono::milliseconds timeout,
      const at::Tensor& arena = {}) = 0;

  // `timeout` is for this call.
  virtual std::unique_ptr<SplitBarrier> split_barrier(
      std::chrono::milliseconds timeout) = 0;

  // Returns a tensor [count] of zeros in one piece of memory that all ranks
  // read and write, while empty_shared() gives each rank its own. `options`
  // names the dtype. Throws c10::DistBackendError on all ranks if one of them
  // cannot have the memory. The tensor may outlive the group. Collectives take
  // it like any other memory, but must not write it on more than one rank.
  virtual at::Tensor zeros_in_common(int64_t count,
                                     const at::TensorOptions& options,
                                     std::chrono::milliseconds timeout) = 0;

  // Whether [data, data + bytes) lies in one tensor of allocateTensor() or
  // zeros_in_common(). Any thread may call.
  virtual bool shares(const void* data, size_t bytes) const = 0;

 protected:
  // Objects are owned as c10d::Backend.
  ~HostSharing() = default;
};

// Returns this interface of the CPU backend of `group` (none means the default
// group), or nullptr if the group's ranks are on several hosts or the backend
// has no shared memory; that is the same on all ranks. The backend owns it, so
// it must not be used for longer than the group.
HostSharing* host_sharing(const ProcessGroupPtr& group);

// Returns a text that is equal for processes that are on one host and may share
// memory: LOCKSTEP_HOST_ID if it is set, otherwise shm::host_identity(). None
// if the system does not tell.
std::optional<std::string> host_id();

}  // namespace lockstep::internal
