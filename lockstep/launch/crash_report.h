#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/worker_failure.h"

namespace lockstep::internal {

// What an agent knows of an attempt that failed.
struct FailedAttempt {
  std::filesystem::path directory{};  // RunDirectory::attempt_directory()
  std::string run_id{};
  std::string host{};
  std::vector<std::string> program{};  // argv
  int restarts_used = 0;
  int max_restarts = 0;
  std::vector<WorkerFailure> failures{};  // sorted by comes_before(), not empty
};

// Writes "crash-report.txt" into the attempt's directory: when, where and what
// failed; of each worker that failed its message, its whole stack, and the last
// lines of its log file; and the flight records that there are. Returns its
// path.
//
// Returns nothing, and writes nothing, if there is neither a stack nor a flight
// record nor a log, so that the launcher's own lines say all; or if the file
// cannot be written.
std::optional<std::filesystem::path> write_crash_report(
    const FailedAttempt& attempt);

}  // namespace lockstep::internal
