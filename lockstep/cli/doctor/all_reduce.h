#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/captured_program.h"
#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// The program of libexec/lockstep that makes the test, and its arguments: two
// ranks all-reduce 4 bytes and 16 MiB for a second altogether, compare every
// element once, and report JSON on stdout (docs/internals/benchmarks.md).
inline constexpr const char* kAllReduceProgram = "lockstep-bench";
std::vector<std::string> all_reduce_arguments();

// Latency and bandwidth of the default backend between two ranks of this host.
// `answer`: what that program did; nothing if it is missing.
Finding check_all_reduce(const std::optional<CapturedProgram>& answer);

}  // namespace lockstep::internal
