#pragma once

#include "lockstep/comm/backend_registry.h"

namespace lockstep::internal::gloo {

// Makes c10d's ProcessGroupGloo, with an abort() that closes its connections.
// It takes CPU tensors, and CUDA tensors through host memory. Its destructor
// waits for queued operations.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

}  // namespace lockstep::internal::gloo
