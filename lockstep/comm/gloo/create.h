#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::gloo {

// c10d's ProcessGroupGloo, with an abort() that closes its connections. CPU
// tensors; CUDA tensors through host memory. Its destructor waits for queued
// operations.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::gloo
