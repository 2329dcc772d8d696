#pragma once

#include <cstddef>
#include <cstdint>

// The element types and operations of the kernels. LibTorch is not used here:
// comm maps at::ScalarType and c10d::ReduceOp to these.
namespace lockstep::internal::kernels {

enum class DType : uint8_t {
  float32,
  float64,
  float16,   // IEEE 754 binary16
  bfloat16,  // the upper half of a float32
  int8,
  uint8,
  int32,
  int64,
  boolean,  // one byte, 0 or 1
};
inline constexpr int kDTypeCount = 9;

enum class ReduceOp : uint8_t {
  sum,
  avg,  // the sum divided by the number of sources; floating point only
  product,
  min,
  max,
  band,  // bitwise, for integers and boolean
  bor,
  bxor,
};
inline constexpr int kReduceOpCount = 8;

size_t size_of(DType dtype);  // bytes of one element
bool is_floating(DType dtype);

// LibTorch's names ("Float", "BFloat16", "Bool") and c10d's ("SUM").
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);

// Whether reduce() takes `op` on `dtype`: avg is for floating point, sum for
// all but boolean, the bitwise ones for integers and boolean.
bool is_reducible(DType dtype, ReduceOp op);

}  // namespace lockstep::internal::kernels
