#include "lockstep/base/deadline.h"

#include <gtest/gtest.h>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

TEST(Deadline, ZeroHasPassedAndNeverGoesNegative) {
  Deadline deadline = Deadline::after(milliseconds(-5));
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), milliseconds(0));
}

TEST(Deadline, RemainingIsWithinWhatWasAllowed) {
  Deadline deadline = Deadline::after(milliseconds(60'000));
  EXPECT_FALSE(deadline.expired());
  EXPECT_LE(deadline.remaining(), milliseconds(60'000));
  EXPECT_GT(deadline.remaining(), milliseconds(0));
  EXPECT_EQ(deadline.allowed(), milliseconds(60'000));
}

TEST(Deadline, TheLongestTimeoutsNeverPass) {
  for (const auto allowed : {milliseconds::max(), milliseconds::max() / 2}) {
    const Deadline deadline = Deadline::after(allowed);
    EXPECT_FALSE(deadline.expired());
    EXPECT_GT(deadline.remaining(), std::chrono::hours(24 * 365));
    EXPECT_EQ(deadline.allowed(), allowed);
  }
}

TEST(Deadline, TimesAreWrittenInSeconds) {
  EXPECT_EQ(seconds_text(milliseconds(500)), "0.5 s");
  EXPECT_EQ(seconds_text(milliseconds(30'000)), "30 s");
}

}  // namespace
}  // namespace lockstep::internal
