// Cases that fail in each way a rank can; harness_test.cpp runs them and reads
// how the failure is reported. Not a test by itself.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <stdexcept>

#include "tests/harness/process_world.h"

using lockstep::internal::testing::World;

WORLD_TEST(Failing, Expectation, 3) {
  EXPECT_NE(world.rank, 1) << "on purpose";
}

WORLD_TEST(Failing, Exception, 3) {
  if (world.rank == 2) throw std::runtime_error("thrown on purpose");
}

WORLD_TEST(Failing, Crash, 3) {
  if (world.rank == 0) ::raise(SIGSEGV);
}

WORLD_TEST(Failing, Exit, 3) {
  if (world.rank == 0) ::_exit(7);
}

WORLD_TEST(Failing, PeerLeftWaiting, 2) {
  if (world.rank == 0) throw std::runtime_error("leaves its peer");
  ::sleep(600);
}

// The world of a failed case is replaced, so this case passes.
WORLD_TEST(Failing, TheNextCaseMeetsAFreshWorld, 2, 3) {
  EXPECT_LT(world.rank, world.size);
}
