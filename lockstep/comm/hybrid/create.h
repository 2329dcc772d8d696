#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::hybrid {

// The backend "lockstep", the default for CPU tensors: finds which ranks share
// a host, and takes what is fastest for that. All on one host: shared memory
// (shm/backend.h). Several hosts: both, hybrid/backend.h. No two ranks that can
// share memory: Gloo.
//
// Ranks of one host that cannot share memory (a system that forbids it, more
// than 64) stand alone, or in parts of 64; a warning of LibTorch's says so
// once.
//
// Blocks until all ranks are there, request.timeout at most. Throws
// c10::DistBackendError with the rank that did not come.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::hybrid
