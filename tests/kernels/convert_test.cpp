#include "lockstep/kernels/convert.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lockstep/kernels/scale.h"
#include "lockstep/kernels/target.h"
#include "tests/kernels/elements.h"
#include "tests/kernels/half_reference.h"

namespace lockstep::kernels {
namespace {

const std::vector<DType> kFloatingTypes = {DType::float32, DType::float64,
                                           DType::float16, DType::bfloat16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<double> kFactors = {0.5,
                                      1.0 / 3,
                                      -0.0,
                                      1e-3,
                                      65504,
                                      kInfinity,
                                      std::numeric_limits<double>::quiet_NaN()};

HalfFormat format_of(DType dtype) {
  return dtype == DType::float16 ? kFloat16 : kBFloat16;
}

std::vector<uint16_t> every_half() {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) {
    bits[i] = static_cast<uint16_t>(i);
  }
  return bits;
}

class ConvertOnTarget : public testing::TestWithParam<std::string> {
 private:
  ForcedTarget forced_{GetParam()};
};

TEST_P(ConvertOnTarget, EveryHalfIsTheFloatThatIeee754Says) {
  const auto bits = every_half();
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    std::vector<float> expected;
    std::vector<double> expected_double;
    for (const uint16_t half : bits) {
      expected_double.push_back(decode(format_of(dtype), half));
      expected.push_back(static_cast<float>(expected_double.back()));
    }
    std::vector<float> floats(bits.size());
    convert(floats.data(), DType::float32, bits.data(), dtype, bits.size());
    EXPECT_TRUE(same_elements(floats.data(), expected.data(), bits.size(),
                              DType::float32));
    std::vector<double> doubles(bits.size());
    convert(doubles.data(), DType::float64, bits.data(), dtype, bits.size());
    EXPECT_TRUE(same_elements(doubles.data(), expected_double.data(),
                              bits.size(), DType::float64));
  }
}

TEST_P(ConvertOnTarget, EveryHalfComesBackFromFloat) {
  const auto bits = every_half();
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    std::vector<float> floats(bits.size());
    convert(floats.data(), DType::float32, bits.data(), dtype, bits.size());
    std::vector<uint16_t> back(bits.size());
    convert(back.data(), dtype, floats.data(), DType::float32, bits.size());
    EXPECT_TRUE(same_elements(back.data(), bits.data(), bits.size(), dtype));
  }
}

TEST_P(ConvertOnTarget, FloatsRoundToTheNearestHalfAndTiesToEven) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    std::vector<float> floats;
    // Of each two neighbours the tie, and the floats on either side of it;
    // the last of them lies between the largest number and infinity.
    for (int half = 0; half <= 0xffff; ++half) {
      const auto bits = static_cast<uint16_t>(half);
      const auto value = static_cast<float>(decode(format_of(dtype), bits));
      uint32_t pattern = std::bit_cast<uint32_t>(value);
      const auto next = static_cast<float>(
          decode(format_of(dtype), static_cast<uint16_t>(half + 1)));
      if (!std::isfinite(value)) {
        continue;
      }
      const float upper =
          std::isfinite(next)
              ? next
              : value + (value - static_cast<float>(
                                     decode(format_of(dtype),
                                            static_cast<uint16_t>(half - 1))));
      const float tie = static_cast<float>((double{value} + upper) / 2);
      floats.insert(floats.end(), {value, tie, std::nextafter(tie, kInfinity),
                                   std::nextafter(tie, -kInfinity),
                                   std::bit_cast<float>(pattern + 1)});
    }
    std::mt19937 rng(7);
    for (int i = 0; i < 1 << 18; ++i) {
      floats.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng())));
    }
    std::vector<uint16_t> expected;
    for (const float value : floats) {
      expected.push_back(encode(format_of(dtype), value));
    }
    std::vector<uint16_t> halves(floats.size());
    convert(halves.data(), dtype, floats.data(), DType::float32, floats.size());
    EXPECT_TRUE(
        same_elements(halves.data(), expected.data(), halves.size(), dtype));
  }
}

// From each type to each, of every length around the vectors'.
TEST_P(ConvertOnTarget, EqualsTheScalarLoopBitByBit) {
  std::mt19937_64 rng(3);
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const size_t offset : {0, 1, 3}) {
        for (const size_t count :
             {0, 1, 7, 8, 15, 16, 31, 32, 33, 63, 65, 999}) {
          Bytes source(count * size_of(from), offset * size_of(from));
          fill(source.data(), count, from, rng);
          Bytes expected(count * size_of(to), 0);
          convert_scalar(expected.data(), to, source.data(), from, count);
          Bytes actual((count + 1) * size_of(to), offset * size_of(to));
          convert(actual.data(), to, source.data(), from, count);
          ASSERT_TRUE(same_elements(actual.data(), expected.data(), count, to))
              << name_of(from) << " to " << name_of(to);
          ASSERT_EQ(actual.data()[count * size_of(to)], 0xa5)
              << name_of(from) << " to " << name_of(to)
              << " wrote past the end";
        }
      }
    }
  }
}

TEST_P(ConvertOnTarget, ScaledEqualsTheScalarLoopBitByBit) {
  std::mt19937_64 rng(4);
  for (const DType from : kFloatingTypes) {
    for (const DType to : kFloatingTypes) {
      for (const double factor : kFactors) {
        for (const size_t count : {0, 1, 31, 32, 33, 65, 999}) {
          Bytes source(count * size_of(from), 0);
          fill(source.data(), count, from, rng);
          Bytes expected(count * size_of(to), 0);
          convert_scaled_scalar(expected.data(), to, source.data(), from, count,
                                factor);
          Bytes actual((count + 1) * size_of(to), size_of(to));
          convert_scaled(actual.data(), to, source.data(), from, count, factor);
          ASSERT_TRUE(same_elements(actual.data(), expected.data(), count, to))
              << name_of(from) << " * " << factor << " to " << name_of(to);
          ASSERT_EQ(actual.data()[count * size_of(to)], 0xa5);
        }
      }
    }
  }
}

TEST_P(ConvertOnTarget, ScaleEqualsTheScalarLoopBitByBitAlsoInPlace) {
  std::mt19937_64 rng(5);
  for (const DType dtype : kFloatingTypes) {
    const size_t size = size_of(dtype);
    for (const double factor : kFactors) {
      for (const Stores stores : {Stores::cached, Stores::streaming}) {
        for (const size_t count : {0, 1, 31, 33, 257, 2100}) {
          Bytes source(count * size, 3 * size);
          fill(source.data(), count, dtype, rng);
          Bytes expected(count * size, 0);
          scale_scalar(expected.data(), source.data(), count, dtype, factor);
          Bytes actual((count + 1) * size, size);
          scale(actual.data(), source.data(), count, dtype, factor, stores);
          ASSERT_TRUE(
              same_elements(actual.data(), expected.data(), count, dtype))
              << name_of(dtype) << " * " << factor;
          ASSERT_EQ(actual.data()[count * size], 0xa5);
          scale(source.data(), source.data(), count, dtype, factor, stores);
          ASSERT_TRUE(
              same_elements(source.data(), expected.data(), count, dtype))
              << name_of(dtype) << " * " << factor << " in place";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, ConvertOnTarget,
                         testing::ValuesIn(supported_targets()),
                         name_of_target);

template <typename To, typename From>
std::vector<To> converted(DType to, DType from, std::vector<From> values) {
  std::vector<To> result(values.size());
  convert_scalar(result.data(), to, values.data(), from, values.size());
  return result;
}

TEST(ConvertScalar, FloatsGoToIntegersTowardsZeroAndStopAtTheLimits) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ((converted<int8_t, float>(
                DType::int8, DType::float32,
                {1.9f, -1.9f, 127.5f, 128, -128.5f, -1e9f, nan, kInfinity})),
            (std::vector<int8_t>{1, -1, 127, 127, -128, -128, 0, 127}));
  EXPECT_EQ((converted<uint8_t, float>(DType::uint8, DType::float32,
                                       {255.9f, 256, -0.9f, -1, nan})),
            (std::vector<uint8_t>{255, 255, 0, 0, 0}));
  EXPECT_EQ((converted<int64_t, double>(DType::int64, DType::float64,
                                        {0x1p62, 0x1p63, -0x1p63, -0x1p64})),
            (std::vector<int64_t>{1ll << 62, INT64_MAX, INT64_MIN, INT64_MIN}));
}

TEST(ConvertScalar, IntegersWrapAndRoundToFloats) {
  EXPECT_EQ((converted<int8_t, int32_t>(DType::int8, DType::int32,
                                        {127, 128, 255, 256, -129})),
            (std::vector<int8_t>{127, -128, -1, 0, 127}));
  EXPECT_EQ((converted<float, int64_t>(DType::float32, DType::int64,
                                       {-3, (1ll << 24) + 1})),
            (std::vector<float>{-3, 0x1p24f}));
  EXPECT_EQ((converted<uint16_t, int32_t>(DType::float16, DType::int32,
                                          {1, 65504, 65520, -2})),
            (std::vector<uint16_t>{0x3c00, 0x7bff, 0x7c00, 0xc000}));
}

TEST(ConvertScalar, AnythingButZeroIsTrue) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ((converted<uint8_t, float>(DType::boolean, DType::float32,
                                       {0.0f, -0.0f, 0.1f, 1e-45f, nan})),
            (std::vector<uint8_t>{0, 0, 1, 1, 1}));
  EXPECT_EQ(
      (converted<uint8_t, int64_t>(DType::boolean, DType::int64, {0, 256, -1})),
      (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(
      (converted<uint16_t, uint8_t>(DType::bfloat16, DType::boolean, {0, 1})),
      (std::vector<uint16_t>{0, 0x3f80}));
}

TEST(ConvertScalar, ProductsAreOfTheWiderType) {
  const std::vector<float> values = {3.0f, 65504.0f, -1.0f};
  std::vector<uint16_t> halves(3);
  convert_scaled_scalar(halves.data(), DType::float16, values.data(),
                        DType::float32, 3, 1.0 / 3);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(halves[i], encode(kFloat16, values[i] * (1.0f / 3)));
  }
  const std::vector<double> doubles = {1.0, 0x1.0000000000001p0};
  std::vector<double> scaled(2);
  scale_scalar(scaled.data(), doubles.data(), 2, DType::float64, 0.1);
  EXPECT_EQ(scaled[0], 0.1);
  EXPECT_EQ(scaled[1], 0x1.0000000000001p0 * 0.1);
}

}  // namespace
}  // namespace lockstep::kernels
