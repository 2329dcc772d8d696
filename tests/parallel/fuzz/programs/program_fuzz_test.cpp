// Compares random programs over wrappers with one process. program_fuzz.cpp
// runs more of them, and reduces a failing one.

#include "tests/parallel/fuzz/expect_cases.h"
#include "tests/parallel/fuzz/programs/program_run.h"

namespace lockstep::internal::fuzz {
namespace {

WORLD_TEST(ProgramFuzz, TrainsAsOneProcessOnSharedMemory, 2, 3) {
  expect_cases_pass(kPrograms, "program_fuzz", "lockstep", 0, 100);
}

WORLD_TEST(ProgramFuzz, TrainsAsOneProcessInOtherPrograms, 2) {
  expect_cases_pass(kPrograms, "program_fuzz", "lockstep", 100, 200);
}

WORLD_TEST(ProgramFuzz, TrainsAsOneProcessOnGloo, 2, 3) {
  expect_cases_pass(kPrograms, "program_fuzz", "gloo", 1000, 1050);
}

// A rarer feature would show its faults too late.
TEST(ProgramFuzzDraw, EachFeatureIsInOneOfEightyPrograms) {
  expect_features_in_one_of_eighty(kPrograms, 49);
}

}  // namespace
}  // namespace lockstep::internal::fuzz
