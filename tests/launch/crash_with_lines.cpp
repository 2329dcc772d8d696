// For tests/launch/source_lines_test.cpp, built with debug information: crashes
// in, or waits in, a function whose name and line must be in the stack. With
// "raise" it sends SIGSEGV to itself.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "lockstep/worker/error_file.h"
#include "lockstep/worker/status_publisher.h"

namespace {

// Not exported, so that only the table of symbols and debug information name
// them.
[[gnu::always_inline]] inline void write_to(volatile int* place) {
  *place = 1;  // the line of the crash
}

[[gnu::noinline]] void write_there(volatile int* place) {
  write_to(place);  // the line of the inlined call
}

[[gnu::noinline]] void wait_there() {
  std::puts("ready");
  std::fflush(stdout);
  // The signal of `lockstep stacks` ends sleep().
  for (int left = 60; left > 0;) {
    left = static_cast<int>(::sleep(60));  // the line of the wait
  }
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::internal::arm_crash_handler();
  if (argc > 1 && std::string(argv[1]) == "wait") {
    const lockstep::internal::StatusPublisher publisher(0);
    wait_there();
    return 0;
  }
  if (argc > 1 && std::string(argv[1]) == "raise") ::raise(SIGSEGV);
  write_there(nullptr);  // the line of the call
  return 0;
}
