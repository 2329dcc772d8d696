#include "lockstep/kernels/kernels.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "tests/kernels/elements.h"

namespace lockstep::internal::kernels {
namespace {

class CopyOnTarget : public testing::TestWithParam<std::string> {
 private:
  ForcedTarget forced_{GetParam()};
};

TEST_P(CopyOnTarget, CopiesEveryByteAndNoMore) {
  std::mt19937_64 rng(1);
  for (const Stores stores : {Stores::cached, Stores::streaming}) {
    for (const size_t bytes : {0,   1,   2,   15,  16,   63,   64,   65,   127,
                               128, 255, 256, 257, 319,  320,  321,  511,  512,
                               575, 576, 577, 999, 1024, 4095, 4096, 65537}) {
      for (const size_t to : {0, 1, 16, 63}) {
        for (const size_t from : {0, 3, 32}) {
          Bytes source(bytes, from);
          fill(source.data(), bytes, DType::uint8, rng);
          Bytes destination(bytes + 2, to);
          copy(destination.data() + 1, source.data(), bytes, stores);
          EXPECT_TRUE(same_elements(destination.data() + 1, source.data(),
                                    bytes, DType::uint8));
          EXPECT_EQ(destination.data()[0], 0xa5);
          EXPECT_EQ(destination.data()[bytes + 1], 0xa5);
        }
      }
    }
  }
}

TEST_P(CopyOnTarget, OfNothingTakesNullPointers) {
  copy(nullptr, nullptr, 0, Stores::cached);
  copy(nullptr, nullptr, 0, Stores::streaming);
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, CopyOnTarget,
                         testing::ValuesIn(supported_targets()),
                         name_of_target);

}  // namespace
}  // namespace lockstep::internal::kernels
