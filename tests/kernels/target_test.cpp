
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::kernels {
namespace {

#if defined(__x86_64__)
TEST(Target, VectorsOfThisMachineAreUsed) {
  if (!__builtin_cpu_supports("avx2")) {
    GTEST_SKIP() << "this machine has no AVX2";
  }
  EXPECT_THAT(supported_targets(), testing::IsSupersetOf({"AVX2", "SSE4"}));
  EXPECT_GT(supported_targets().size(), 2u);
  EXPECT_NE(supported_targets().front(), supported_targets().back());
}
#endif

TEST(Target, AForcedOneIsInUseUntilTheEndOfItsScope) {
  const auto all = supported_targets();
  const std::string before = supported_targets().front();
  for (const std::string& name : all) {
    const ForcedTarget forced(name);
    EXPECT_EQ(supported_targets().front(), name);
    float value = 1;
    void* const destinations[] = {&value};
    const void* const sources[] = {&value, &value};
    reduce(destinations, sources, 1, DType::float32, ReduceOp::sum);
    EXPECT_EQ(value, 2);
    EXPECT_EQ(supported_targets().front(), name);
  }
  EXPECT_EQ(supported_targets().front(), before);
  EXPECT_EQ(supported_targets(), all);
}

TEST(Target, OneThatDoesNotExistIsRefusedByName) {
  try {
    const ForcedTarget forced("AVX9");
    FAIL() << "AVX9 was taken";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("AVX9"));
    EXPECT_THAT(error.what(), testing::HasSubstr(supported_targets()[0]));
  }
}

}  // namespace
}  // namespace lockstep::internal::kernels
