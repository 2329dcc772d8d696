#pragma once

// The end of every test program's main().
namespace lockstep::testing {

// The exit status that tells ctest that a program has skipped all its cases:
// SKIP_RETURN_CODE in cmake/LockstepTest.cmake.
inline constexpr int kAllSkipped = 77;

// RUN_ALL_TESTS(), with a status that says so if no case was run: 0 would show
// a skipped program as passed.
int run_all_tests();

}  // namespace lockstep::testing
