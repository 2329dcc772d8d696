#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/kernels/kernels.h"
#include "tests/kernels/elements.h"
#include "tests/kernels/half_reference.h"

// Checks the reference itself: against numbers written down here and, for half
// types, against independent arithmetic.
namespace lockstep::internal::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One element from each source.
template <typename T>
T reduced(DType dtype, ReduceOp op, const std::vector<T>& values) {
  std::vector<const void*> sources;
  for (const T& value : values) {
    sources.push_back(&value);
  }
  T result{};
  void* const destinations[] = {&result};
  reduce_scalar(destinations, sources, 1, dtype, op);
  return result;
}

float of_floats(ReduceOp op, const std::vector<float>& values) {
  return reduced(DType::float32, op, values);
}

TEST(ReduceScalar, SumsFromLeftToRight) {
  EXPECT_EQ(of_floats(ReduceOp::sum, {1e8f, -1e8f, 1}), 1);
  EXPECT_EQ(of_floats(ReduceOp::sum, {1e8f, 1, -1e8f}), 0);
  EXPECT_EQ(reduced<double>(DType::float64, ReduceOp::sum, {1e17, -1e17, 1}),
            1);
}

TEST(ReduceScalar, OfOneSourceIsThatSource) {
  EXPECT_TRUE(std::signbit(of_floats(ReduceOp::sum, {-0.0f})));
  EXPECT_EQ(of_floats(ReduceOp::avg, {3}), 3);
  EXPECT_EQ(reduced<int32_t>(DType::int32, ReduceOp::bxor, {6}), 6);
}

TEST(ReduceScalar, AveragesByOneDivision) {
  EXPECT_EQ(of_floats(ReduceOp::avg, {1, 2, 4}), 7.0f / 3);
  EXPECT_EQ(of_floats(ReduceOp::avg, {3e38f, 3e38f}), kInfinity);
}

TEST(ReduceScalar, NanWinsOverEveryNumber) {
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    EXPECT_TRUE(std::isnan(of_floats(op, {kNan, 1})));
    EXPECT_TRUE(std::isnan(of_floats(op, {1, kNan})));
    EXPECT_TRUE(std::isnan(of_floats(op, {-kInfinity, kNan, kInfinity})));
    EXPECT_TRUE(
        std::isnan(reduced<double>(DType::float64, op, {1, double{kNan}, 2})));
  }
}

TEST(ReduceScalar, MinPrefersNegativeZeroAndMaxPositive) {
  for (const std::vector<float>& zeros :
       {std::vector<float>{0.0f, -0.0f}, std::vector<float>{-0.0f, 0.0f}}) {
    EXPECT_TRUE(std::signbit(of_floats(ReduceOp::min, zeros)));
    EXPECT_FALSE(std::signbit(of_floats(ReduceOp::max, zeros)));
  }
}

TEST(ReduceScalar, IntegersWrap) {
  EXPECT_EQ(reduced<int8_t>(DType::int8, ReduceOp::sum, {127, 1}), -128);
  EXPECT_EQ(reduced<int8_t>(DType::int8, ReduceOp::product, {-3, 100}), -44);
  EXPECT_EQ(reduced<uint8_t>(DType::uint8, ReduceOp::product, {200, 200}), 64);
  EXPECT_EQ(reduced<int32_t>(DType::int32, ReduceOp::sum, {INT32_MAX, 1}),
            INT32_MIN);
  EXPECT_EQ(reduced<int64_t>(DType::int64, ReduceOp::product,
                             {1ll << 40, (1ll << 40) + 3}),
            static_cast<int64_t>(3ull << 40));
}

TEST(ReduceScalar, MinAndMaxOfIntegersKnowTheirSign) {
  EXPECT_EQ(reduced<int8_t>(DType::int8, ReduceOp::min, {1, -1}), -1);
  EXPECT_EQ(reduced<uint8_t>(DType::uint8, ReduceOp::min, {1, 255}), 1);
  EXPECT_EQ(reduced<int64_t>(DType::int64, ReduceOp::max, {INT64_MIN, -1}), -1);
}

TEST(ReduceScalar, ProductAndMinOfBooleansAreAndMaxIsOr) {
  for (const uint8_t a : {0, 1}) {
    for (const uint8_t b : {0, 1}) {
      const std::vector<uint8_t> both = {a, b};
      for (const ReduceOp op :
           {ReduceOp::product, ReduceOp::min, ReduceOp::band}) {
        EXPECT_EQ(reduced(DType::boolean, op, both), a & b);
      }
      for (const ReduceOp op : {ReduceOp::max, ReduceOp::bor}) {
        EXPECT_EQ(reduced(DType::boolean, op, both), a | b);
      }
      EXPECT_EQ(reduced(DType::boolean, ReduceOp::bxor, both), a ^ b);
    }
  }
}

// A float32 sum of halves, rounded once at the end.
TEST(ReduceScalar, HalvesAccumulateInFloatAndAreRoundedOnce) {
  // 2048 + 1 is not a float16: rounding in between would give 2048.
  EXPECT_EQ(reduced<uint16_t>(DType::float16, ReduceOp::sum,
                              {0x6800, 0x3c00, 0x3c00}),
            encode(kFloat16, 2050));
  std::mt19937_64 rng(11);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const HalfFormat format = dtype == DType::float16 ? kFloat16 : kBFloat16;
    for (int trial = 0; trial < 20000; ++trial) {
      std::vector<uint16_t> values(1 + trial % 5);
      fill(values.data(), values.size(), dtype, rng);
      auto sum = static_cast<float>(decode(format, values[0]));
      for (size_t i = 1; i < values.size(); ++i) {
        sum += static_cast<float>(decode(format, values[i]));
      }
      const uint16_t expected_sum = encode(format, sum);
      const uint16_t actual_sum = reduced(dtype, ReduceOp::sum, values);
      EXPECT_TRUE(same_elements(&actual_sum, &expected_sum, 1, dtype));
      const uint16_t expected_mean =
          encode(format, sum / static_cast<float>(values.size()));
      const uint16_t actual_mean = reduced(dtype, ReduceOp::avg, values);
      EXPECT_TRUE(same_elements(&actual_mean, &expected_mean, 1, dtype));
    }
  }
}

TEST(DTypes, SaysWhatCanBeReduced) {
  for (const DType dtype : kDTypes) {
    EXPECT_EQ(is_reducible(dtype, ReduceOp::avg), is_floating(dtype));
    EXPECT_EQ(is_reducible(dtype, ReduceOp::sum), dtype != DType::boolean);
    EXPECT_TRUE(is_reducible(dtype, ReduceOp::max));
    for (const ReduceOp op : {ReduceOp::band, ReduceOp::bor, ReduceOp::bxor}) {
      EXPECT_EQ(is_reducible(dtype, op), !is_floating(dtype));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::kernels
