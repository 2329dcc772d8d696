#pragma once

#include <cstddef>

#include "lockstep/kernels/dtype.h"

// Converts from one element type to another, over raw pointers, with the
// meaning of LibTorch's Tensor::to.
namespace lockstep::kernels {

// Writes destination[i] = source[i] as `to`:
// - to a floating type: rounded to nearest, ties to even. float64 and the
//   integers reach float16 and bfloat16 by way of float32, so they are rounded
//   twice.
// - floating point to integers: towards zero. What LibTorch leaves undefined:
//   NaN gives 0, and a number that does not fit gives the nearest one that
//   does.
// - among integers: wraps.
// - to boolean: whether it is not 0, so NaN gives 1. From boolean: 0 or 1.
// If both types are the same, the bytes are copied.
//
// The memory must not overlap. Pointers are aligned to their element. Throws
// nothing; thread-safe. Vectorised among the floating types.
void convert(void* destination, DType to, const void* source, DType from,
             size_t count);

// Writes destination[i] = (source[i] * factor) as `to`, in one pass: for
// averaging compressed gradients. For floating types only (is_floating). The
// product is computed in float64 if either type is float64, otherwise in
// float32, to which the factor is rounded first.
void convert_scaled(void* destination, DType to, const void* source, DType from,
                    size_t count, double factor);

// The plain loops that the functions above must equal bit by bit.
void convert_scalar(void* destination, DType to, const void* source, DType from,
                    size_t count);
void convert_scaled_scalar(void* destination, DType to, const void* source,
                           DType from, size_t count, double factor);

}  // namespace lockstep::kernels
