#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::internal::shm {

// Makes the backend "shm": shared memory between ranks of one host (backend.h
// and docs/internals/shared-memory.md), for CPU tensors and at most 64 ranks.
//
// Blocks until all ranks have come, for request.time_to_meet() at most. Throws
// std::invalid_argument if there are too many ranks or LOCKSTEP_TUNING is wrong
// (protocol/tuning.h). Throws c10::DistBackendError on every rank, with the
// rank and the reason, if the ranks cannot share memory or one of them does not
// come.
//
// Keys in the store, all with the prefix "shm/": host/R, what rank R says about
// its host; told, how many ranks know that the ranks cannot share memory; and
// the keys of meet().
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::internal::shm
