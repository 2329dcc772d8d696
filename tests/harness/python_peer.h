#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// A Python program whose results a test compares with ours. Nothing of
// Lockstep runs in it, so if it crashes, Python or torch is at fault: torch
// 2.13 has done so (SIGSEGV) in one of some hundred runs.
struct PythonPeer {
  // The script and its arguments.
  std::vector<std::string> arguments;
  // How many ranks torchrun starts, or 0 for one process without torchrun.
  int ranks{0};
  // Variables that precede PATH, OMP_NUM_THREADS=1 and Python's own.
  std::vector<std::string> environment{};
  std::string input{};  // stdin
  // For all starts together, even if the caller is killed.
  std::chrono::seconds allowed{50};
};

// Runs a peer to its end and returns what it wrote to stdout. A peer that
// crashes is started a second time. That is told on stderr and as a line of
// test-results/python_crashes.txt, which `./dev test` counts. The test fails
// if the peer crashes again, and at once if it fails in any other way.
std::string run_python_peer(const PythonPeer& peer);

// Returns what a test says of a Python process that failed and cannot be
// started again, as it was a rank beside ours: its stderr, and first whether it
// crashed.
std::string words_of_peer(const ProgramResult& result);

}  // namespace lockstep::internal::testing
