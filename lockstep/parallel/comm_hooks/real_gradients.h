#pragma once

#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep::internal {

// Throws std::invalid_argument if the bucket's gradients are complex, for hooks
// that compress real numbers only. `hook`: the name of its function. Internal
// to comm_hooks.
void require_real(const GradBucket& bucket, const char* hook);

}  // namespace lockstep::internal
