#include "tests/harness/process_world.h"

int main(int argc, char** argv) {
  return lockstep::internal::testing::run_tests(argc, argv);
}
