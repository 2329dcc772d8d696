#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

// The columns of each of `matrices` ([count, rows, columns], columns <= rows)
// become orthonormal, in place: by Gram-Schmidt up to two columns and for half
// types, else by QR, as Python's PowerSGD does it.
//
// `epsilon` is added to the norms by which Gram-Schmidt divides. A column of
// norm 0 stays 0 (in Python it becomes NaN if epsilon is 0). Internal to
// comm_hooks.
void orthogonalize(const at::Tensor& matrices, double epsilon);

}  // namespace lockstep
