#pragma once

#include <cstddef>

#include "lockstep/kernels/copy.h"
#include "lockstep/kernels/dtype.h"

namespace lockstep::internal::kernels {

// Writes destination[i] = source[i] * factor, rounded once: in float64 for
// float64, otherwise in float32, to which the factor is rounded first. For
// floating types only (is_floating). The destination may be the source;
// otherwise the memory must not overlap. Pointers are aligned to their element.
// Throws nothing; thread-safe.
void scale(void* destination, const void* source, size_t count, DType dtype,
           double factor, Stores stores = Stores::cached);

// The plain loop that scale() must equal bit by bit.
void scale_scalar(void* destination, const void* source, size_t count,
                  DType dtype, double factor);

}  // namespace lockstep::internal::kernels
