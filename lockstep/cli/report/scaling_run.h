#pragma once

#include <chrono>
#include <optional>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>

#include "lockstep/cli/report/scaling_cases.h"
#include "lockstep/cli/stop_signal.h"

namespace lockstep::internal {

// Thrown if a run fails or says nothing that can be measured.
class ScalingError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The result of one run of a case.
struct ScalingMeasurement {
  double samples_per_s = 0;          // of all processes
  double seconds = 0;                // from the start of the command to its end
  std::optional<double> target_s{};  // until the target was met
  std::set<std::string> metrics{};   // that the processes logged
};

// How a case is run.
struct ScalingRunOptions {
  // "loss<=0.3", or empty.
  std::string target{};
  // Finds the samples per second in the output of a program that leaves no
  // summary (worker/training_counters.h): the first group of the last match.
  std::regex rate_pattern{};
  std::chrono::milliseconds timeout{};
};

// Runs a case once: `ranks` and `threads` under this `lockstep run`, the
// compared command in a shell. OMP_NUM_THREADS is 1, but for `threads` it is
// their number. The output goes to a file, which is removed. Blocks. No process
// is left, whatever is thrown: ScalingError with the last lines of the output,
// Interrupted, std::system_error.
ScalingMeasurement run_case(const ScalingCase& which,
                            const ScalingRunOptions& options,
                            const StopSignal& stop);

}  // namespace lockstep::internal
