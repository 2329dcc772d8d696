#pragma once

// Called last by every test program's main().
namespace lockstep::internal::testing {

// The exit status that tells ctest that a program has skipped all its cases:
// SKIP_RETURN_CODE in cmake/LockstepTest.cmake.
inline constexpr int kAllSkipped = 77;

// Calls RUN_ALL_TESTS(). Returns its status, or kAllSkipped if every case was
// skipped: with 0 a skipped program would show as passed.
int run_all_tests();

}  // namespace lockstep::internal::testing
