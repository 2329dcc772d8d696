#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

// Converts float16 and bfloat16 by the words of IEEE 754, in double, which
// holds every value and every tie between two of them. It shares no code with
// the kernels, in order to check them.
namespace lockstep::internal::kernels {

struct HalfFormat {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int largest_exponent() const { return (1 << exponent_bits) - 1; }
};
inline constexpr HalfFormat kFloat16{.exponent_bits = 5, .mantissa_bits = 10};
inline constexpr HalfFormat kBFloat16{.exponent_bits = 8, .mantissa_bits = 7};

inline double decode(HalfFormat format, uint16_t bits) {
  const int exponent = bits >> format.mantissa_bits & format.largest_exponent();
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  double value;
  if (exponent == format.largest_exponent()) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits),
                       exponent - format.bias() - format.mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

// Rounds to nearest, ties to even.
inline uint16_t encode(HalfFormat format, double value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::fabs(value);
  const int infinity = format.largest_exponent() << format.mantissa_bits;
  if (std::isnan(value)) {
    return static_cast<uint16_t>(infinity | 1 << (format.mantissa_bits - 1));
  }
  if (magnitude == 0 || std::isinf(value)) {
    return static_cast<uint16_t>(sign | (magnitude == 0 ? 0 : infinity));
  }
  const int exponent =
      std::max(std::ilogb(magnitude), 1 - format.bias());  // of the last place
  const double places =
      std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const double rounded = std::ldexp(places, exponent - format.mantissa_bits);
  if (rounded >= std::ldexp(1, format.bias() + 1)) {
    return static_cast<uint16_t>(sign | infinity);
  }
  const int power = std::max(std::ilogb(rounded), 1 - format.bias());
  const int whole =
      static_cast<int>(std::ldexp(rounded, format.mantissa_bits - power));
  const bool subnormal = whole < 1 << format.mantissa_bits;
  const int stored_exponent = subnormal ? 0 : power + format.bias();
  return static_cast<uint16_t>(sign | stored_exponent << format.mantissa_bits |
                               (whole & ((1 << format.mantissa_bits) - 1)));
}

}  // namespace lockstep::internal::kernels
