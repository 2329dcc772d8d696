#pragma once

#include <c10/core/ScalarType.h>

namespace lockstep::internal {

// Warns, once for each dtype and process, if matrix products in `dtype` have no
// fast kernel on this CPU: they then take many times as long as in float32.
// Calls the operators by which LibTorch itself decides; if this LibTorch does
// not have them, the CPU counts as fast.
void warn_if_slow_on_cpu(c10::ScalarType dtype);

}  // namespace lockstep::internal
