#pragma once

#include <string>

#include "lockstep/comm/backend_registry.h"

namespace lockstep::nccl {

// c10d's ProcessGroupNCCL for CUDA tensors (docs/nccl.md). In a build without
// NCCL (no_nccl.cpp) it throws std::invalid_argument with missing().
//
// Makes local_device() this thread's current device and binds the group to it,
// then connects at once: what device_id does in Python. Blocks for
// request.timeout until every rank is there, and after that as NCCL does,
// which knows no deadline.
//
// Threads of its own: c10d's watchdog and heartbeat monitor, and one that waits
// for the word of a rank that leaves (departure.h). abort() gives that word,
// ends this rank's kernels and throws nothing. The destructor flushes what is
// pending, as Python's destroy_process_group(), unless the group was aborted.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

// Why there is no NCCL here and what to do about it; empty if there is. Throws
// std::invalid_argument where this rank has no GPU of its own
// (local_device()).
std::string missing();

}  // namespace lockstep::nccl
