#include "lockstep/kernels/half_bits.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/half_reference.h"

namespace lockstep::internal::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Half {
  HalfFormat format;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
};

const std::vector<Half> kHalves = {
    {kFloat16, float_of_float16, float16_of_float},
    {kBFloat16, float_of_bfloat16, bfloat16_of_float}};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

TEST(HalfBits, EveryHalfIsTheFloatThatIeee754Says) {
  for (const auto& half : kHalves) {
    for (int i = 0; i <= 0xffff; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const float value = half.to_float(bits);
      const auto expected = static_cast<float>(decode(half.format, bits));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << i;
        ASSERT_TRUE(std::isnan(half.to_float(half.from_float(value)))) << i;
      } else {
        ASSERT_EQ(bits_of(value), bits_of(expected)) << i;
        ASSERT_EQ(half.from_float(value), bits);
      }
    }
  }
}

TEST(HalfBits, FloatsRoundToTheNearestHalfAndTiesToEven) {
  for (const auto& half : kHalves) {
    std::vector<float> floats;
    // For each two neighbours: their tie, and the floats on either side of it.
    // The last tie lies between the largest number and infinity.
    for (int i = 0; i <= 0xffff; ++i) {
      const auto at = [&](int bits) {
        return static_cast<float>(
            decode(half.format, static_cast<uint16_t>(bits)));
      };
      const float value = at(i);
      if (!std::isfinite(value)) continue;
      const float next = at(i + 1);
      const float upper =
          std::isfinite(next) ? next : value + (value - at(i - 1));
      const auto tie = static_cast<float>((double{value} + upper) / 2);
      floats.insert(floats.end(), {value, tie, std::nextafter(tie, kInfinity),
                                   std::nextafter(tie, -kInfinity),
                                   std::bit_cast<float>(bits_of(value) + 1)});
    }
    std::mt19937 rng(7);
    for (int i = 0; i < 1 << 18; ++i) {
      floats.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng())));
    }
    for (const float value : floats) {
      const uint16_t expected = encode(half.format, value);
      const uint16_t rounded = half.from_float(value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(half.to_float(rounded))) << bits_of(value);
      } else {
        ASSERT_EQ(rounded, expected) << bits_of(value);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::kernels
