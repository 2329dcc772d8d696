#pragma once

#include "lockstep/kernels/kernels.h"

// Internal to kernels. There is one file for each family of element types,
// because a file is compiled for every instruction set: so none takes minutes
// to compile.
namespace lockstep::internal::kernels {

struct ReduceCall {
  std::span<void* const> destinations;
  std::span<const void* const> sources;
  size_t count;
  DType dtype;
  ReduceOp op;
  Stores stores;
};

void reduce_floats(const ReduceCall& call);    // float32, float64
void reduce_halves(const ReduceCall& call);    // float16, bfloat16
void reduce_integers(const ReduceCall& call);  // the rest

}  // namespace lockstep::internal::kernels
