#pragma once

#include <bit>
#include <cstdint>

// float16 and bfloat16 as their 16 bits, one value at a time: the plain
// reference of half_vectors_inl.h. Conversion to float32 is exact. Conversion
// from float32 rounds to nearest, ties to even; it gives infinity past the
// largest number, and keeps subnormals. A NaN stays a NaN; its payload may
// change.
namespace lockstep::internal::kernels {

inline float float_of_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

inline uint16_t bfloat16_of_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return 0x7fc0;  // the addition below could turn a NaN into a number
  }
  // Adds half of the last place that stays, less one if that place is even.
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_float16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude < 0x0400) {  // zero and subnormals: multiples of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  // The exponent's bias is 127 instead of 15. In infinity and NaN all bits of
  // the exponent are set, so there the difference, 112, is added twice.
  const uint32_t bias = magnitude < 0x7c00 ? 112u << 23 : 224u << 23;
  return std::bit_cast<float>(((magnitude << 13) + bias) | sign);
}

inline uint16_t float16_of_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00;
  } else if (magnitude >= 0x47800000) {  // 2^16 and more
    result = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the least normal one
    // Past 65504 the rounding carries into the exponent: infinity.
    result = ((magnitude + 0x0fff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
  } else {
    // The last place of 0.5 is 2^-24, so the addition rounds as we want.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    result = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f);
  }
  return static_cast<uint16_t>(result | sign);
}

}  // namespace lockstep::internal::kernels
