#pragma once

#include <string>

#include "lockstep/comm/backend_registry.h"

namespace lockstep::internal::nccl {

// Makes c10d's ProcessGroupNCCL for CUDA tensors (docs/nccl.md). In a build
// without NCCL (no_nccl.cpp) it throws std::invalid_argument with missing().
//
// Makes local_device() this thread's current device, binds the group to it and
// then connects at once, as device_id does in Python. Blocks until every rank
// has come, for request.timeout at most, and after that as long as NCCL does,
// which knows no deadline.
//
// The backend has threads of its own: c10d's watchdog and heartbeat monitor,
// and one that looks for the notice of a rank that leaves (departure.h).
// abort() gives that notice, ends this rank's kernels and throws nothing. The
// destructor flushes pending operations, as Python's destroy_process_group()
// does, unless the group was aborted.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

// Returns why NCCL cannot be used here and what to do about it; empty if it
// can. Throws std::invalid_argument if this rank has no GPU of its own
// (local_device()).
std::string missing();

}  // namespace lockstep::internal::nccl
