#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::internal {

// Makes the columns of each of `matrices` ([count, rows, columns], columns <=
// rows) orthonormal, in place: by Gram-Schmidt for up to two columns and for
// 16-bit dtypes, otherwise by QR, as Python's PowerSGD does.
//
// Gram-Schmidt adds `epsilon` to the norms by which it divides. A column of
// norm 0 stays 0 (in Python it becomes NaN if epsilon is 0). Internal to
// comm_hooks.
void orthogonalize(const at::Tensor& matrices, double epsilon);

}  // namespace lockstep::internal
