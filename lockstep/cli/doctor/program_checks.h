#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// How a program ended, and what it wrote.
struct CapturedProgram {
  bool in_time = true;  // if not, it was killed
  int exit_code = 0;    // 128 + signal if a signal ended it
  std::string out{};    // stdout and stderr, the first MiB of each
  std::string err{};

  bool succeeded() const { return in_time && exit_code == 0; }
  // Returns the last line of stderr, where programs say why they failed; empty
  // if they said nothing.
  std::string last_line() const;
};

// Runs a program with this environment and without stdin. Blocks until it has
// closed its output and ended, for `allowed` at most, then kills it and its
// process group. It also dies with the calling thread. Throws
// std::system_error if it cannot be started.
CapturedProgram run_captured(const std::filesystem::path& path,
                             const std::vector<std::string>& arguments,
                             std::chrono::milliseconds allowed);

// The program of libexec/lockstep that links LibTorch and describes it as JSON
// (torch/main.cpp).
inline constexpr const char* kTorchProgram = "lockstep-doctor-torch";

// LibTorch, and the backends of Lockstep that can be used here. `answer`: what
// that program did; nothing if it is missing. `gpus`: how many ranks will see.
std::vector<Finding> check_libtorch(
    const std::optional<CapturedProgram>& answer, int gpus);

// The program of libexec/lockstep that makes the test, and its arguments: two
// ranks all-reduce 4 bytes and 16 MiB for a second altogether, compare every
// element once, and report JSON on stdout (docs/internals/benchmarks.md).
inline constexpr const char* kAllReduceProgram = "lockstep-bench";
std::vector<std::string> all_reduce_arguments();

// Latency and bandwidth of the default backend between two ranks of this host.
// `answer`: what that program did; nothing if it is missing.
Finding check_all_reduce(const std::optional<CapturedProgram>& answer);

}  // namespace lockstep::internal
