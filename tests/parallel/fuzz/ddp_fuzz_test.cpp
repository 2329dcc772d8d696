// Compares random modules, options and schedules with LibTorch alone.
// ddp_fuzz.cpp runs more of them, and reduces a failing one.

#include "tests/parallel/fuzz/ddp_subject.h"
#include "tests/parallel/fuzz/expect_cases.h"

namespace lockstep::internal::fuzz {
namespace {

WORLD_TEST(DdpFuzz, TrainsAsOneProcessOnSharedMemory, 2, 3) {
  expect_cases_pass(kDdpCases, "ddp_fuzz", "lockstep", 0, 150);
}

WORLD_TEST(DdpFuzz, TrainsAsOneProcessOnGloo, 2, 3) {
  expect_cases_pass(kDdpCases, "ddp_fuzz", "gloo", 1000, 1075);
}

// A rarer feature would show its faults too late.
TEST(DdpFuzzDraw, EachFeatureIsInOneOfEightyCases) {
  expect_features_in_one_of_eighty(kDdpCases, 60);
}

}  // namespace
}  // namespace lockstep::internal::fuzz
