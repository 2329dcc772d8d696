#pragma once

#include <cstdint>

#include "lockstep/kernels/dtype.h"
#include "lockstep/kernels/half_bits.h"

// Element types for the plain loops: how one is stored, and in which type it is
// computed.
namespace lockstep::internal::kernels {

template <typename T>
struct PlainElement {
  using Stored = T;
  using Value = T;
  static Value load(Stored stored) { return stored; }
  static Stored store(Value value) { return value; }
};

struct Float16Element {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored stored) { return float_of_float16(stored); }
  static Stored store(Value value) { return float16_of_float(value); }
};

struct BFloat16Element {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored stored) { return float_of_bfloat16(stored); }
  static Stored store(Value value) { return bfloat16_of_float(value); }
};

// Returns body(Element()) for a dtype. Booleans are bytes here.
template <typename Body>
void with_element(DType dtype, Body body) {
  switch (dtype) {
    case DType::float32:
      return body(PlainElement<float>());
    case DType::float64:
      return body(PlainElement<double>());
    case DType::float16:
      return body(Float16Element());
    case DType::bfloat16:
      return body(BFloat16Element());
    case DType::int8:
      return body(PlainElement<int8_t>());
    case DType::uint8:
    case DType::boolean:
      return body(PlainElement<uint8_t>());
    case DType::int32:
      return body(PlainElement<int32_t>());
    case DType::int64:
      return body(PlainElement<int64_t>());
  }
}

}  // namespace lockstep::internal::kernels
