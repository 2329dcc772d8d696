#include "tests/harness/all_tests.h"

#include <gtest/gtest.h>

namespace lockstep::internal::testing {

int run_all_tests() {
  const int status = RUN_ALL_TESTS();
  const auto& cases = *::testing::UnitTest::GetInstance();
  const bool none_ran =
      cases.skipped_test_count() > 0 && cases.successful_test_count() == 0;
  return status == 0 && none_ran ? kAllSkipped : status;
}

}  // namespace lockstep::internal::testing
