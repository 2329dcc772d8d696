#pragma once

#include <c10/core/ScalarType.h>

namespace lockstep::amp_detail {

// Warns, once in a process and dtype, if matrix products in `dtype` have no
// fast kernel on this CPU: they then take many times as long as in float32.
// LibTorch is asked what it asks itself; a LibTorch that cannot be asked is
// taken for a fast one.
void warn_if_slow_on_cpu(c10::ScalarType dtype);

}  // namespace lockstep::amp_detail
