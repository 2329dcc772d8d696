#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::internal::hybrid {

// Makes the backend "lockstep", the default for CPU tensors: finds out which
// ranks share a host, and takes what is fastest for that. All ranks on one
// host: shared memory (shm/backend.h). Several hosts: shared memory and Gloo
// (hybrid/backend.h). No two ranks that can share memory: Gloo.
//
// If ranks of one host cannot share memory because the system forbids it, each
// of them counts as a host of its own; a warning of LibTorch's says so once.
// More than 64 ranks of one host share memory in parts of 64.
//
// Blocks until all ranks have come, for request.time_to_meet() at most. Throws
// c10::DistBackendError with the ranks that did not come.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::internal::hybrid
