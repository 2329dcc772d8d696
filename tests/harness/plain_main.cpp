// The main() of test programs whose cases run in this process.

#include <gtest/gtest.h>

#include "tests/harness/all_tests.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return lockstep::internal::testing::run_all_tests();
}
