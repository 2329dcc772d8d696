#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::shm {

// Shared memory between ranks of one host: backend.h, and
// docs/shared-memory.md. CPU tensors; at most 64 ranks.
//
// Blocks until all ranks are there, request.timeout at most. Throws
// std::invalid_argument if there are too many ranks or LOCKSTEP_TUNING is wrong
// (tuning.h), c10::DistBackendError on every rank, with the rank and the
// reason, if they cannot share memory or one of them does not come.
//
// Keys in the store, behind "shm/": host/R, what rank R says of its host;
// told, how many ranks know that theirs are not one; and those of meet().
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::shm
