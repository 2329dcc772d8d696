#include "lockstep/kernels/kernels.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/elements.h"

namespace lockstep::internal::kernels {
namespace {

const std::vector<DType> kFloatingTypes = {DType::float32, DType::float64,
                                           DType::float16, DType::bfloat16};
const std::vector<double> kFactors = {1.0,
                                      0.5,
                                      1.0 / 3,
                                      -0.0,
                                      1e-3,
                                      65504,
                                      std::numeric_limits<double>::infinity(),
                                      std::numeric_limits<double>::quiet_NaN()};

class ScaleOnTarget : public testing::TestWithParam<std::string> {
 private:
  ForcedTarget forced_{GetParam()};
};

TEST_P(ScaleOnTarget, EqualsTheScalarLoopBitByBitAlsoInPlace) {
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

// half_bits_test.cpp compares the scalar loop's conversions with IEEE 754.
TEST_P(ScaleOnTarget, OfEveryHalfEqualsTheScalarLoop) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const double factor : {1.0, 0.5, 1.0 / 3, 1e-3, 3.0, 0x1p-12}) {
      std::vector<uint16_t> expected(halves.size());
      scale_scalar(expected.data(), halves.data(), halves.size(), dtype,
                   factor);
      std::vector<uint16_t> actual(halves.size());
      scale(actual.data(), halves.data(), halves.size(), dtype, factor);
      EXPECT_TRUE(
          same_elements(actual.data(), expected.data(), halves.size(), dtype))
          << name_of(dtype) << " * " << factor;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, ScaleOnTarget,
                         testing::ValuesIn(supported_targets()),
                         name_of_target);

TEST(ScaleScalar, ProductsAreOfTheTypeItself) {
  const std::vector<double> doubles = {1.0, 0x1.0000000000001p0};
  std::vector<double> scaled(2);
  scale_scalar(scaled.data(), doubles.data(), 2, DType::float64, 0.1);
  EXPECT_EQ(scaled[0], 0.1);
  EXPECT_EQ(scaled[1], 0x1.0000000000001p0 * 0.1);
  const float third = 1.0F / 3;
  float product = 3;
  scale_scalar(&product, &product, 1, DType::float32, 1.0 / 3);
  EXPECT_EQ(product, 3 * third);
}

}  // namespace
}  // namespace lockstep::internal::kernels
