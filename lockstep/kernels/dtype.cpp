#include "lockstep/kernels/dtype.h"

namespace lockstep::internal::kernels {

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

bool is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 ||
         dtype == DType::float16 || dtype == DType::bfloat16;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "Float";
    case DType::float64:
      return "Double";
    case DType::float16:
      return "Half";
    case DType::bfloat16:
      return "BFloat16";
    case DType::int8:
      return "Char";
    case DType::uint8:
      return "Byte";
    case DType::int32:
      return "Int";
    case DType::int64:
      return "Long";
    case DType::boolean:
      return "Bool";
  }
  return "?";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "SUM";
    case ReduceOp::avg:
      return "AVG";
    case ReduceOp::product:
      return "PRODUCT";
    case ReduceOp::min:
      return "MIN";
    case ReduceOp::max:
      return "MAX";
    case ReduceOp::band:
      return "BAND";
    case ReduceOp::bor:
      return "BOR";
    case ReduceOp::bxor:
      return "BXOR";
  }
  return "?";
}

bool is_reducible(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return dtype != DType::boolean;
    case ReduceOp::avg:
      return is_floating(dtype);
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::max:
      return true;
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      return !is_floating(dtype);
  }
  return false;
}

}  // namespace lockstep::internal::kernels
