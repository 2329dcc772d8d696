#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/launch/watch/worker_failure.h"

namespace lockstep::internal {

// An agent's knowledge of an attempt that failed. It is told in three ways: the
// launcher's lines (worker_failure.h), the crash report, and the job's report
// (job_report.h).
struct FailedAttempt {
  std::filesystem::path directory{};  // RunDirectory::attempt_directory()
  std::string run_id{};
  std::string host{};
  std::vector<std::string> program{};  // argv
  int restarts_used = 0;
  int max_restarts = 0;
  // One line: the worker that failed first, maybe on another node, or what else
  // ended the attempt.
  std::string cause{};
  // Those of this node, sorted by comes_before(); empty if it was another's.
  std::vector<WorkerFailure> failures{};
  // read_files() sets both.
  std::vector<std::filesystem::path> flight_records{};
  std::filesystem::path stacks{};  // of all ranks, if one hung; else empty
  // The result of write_crash_report(); empty if there is none.
  std::filesystem::path crash_report{};

  // Reads what the workers have left in the directory: the last lines of their
  // log files, and which records there are. What cannot be read is left out.
  void read_files();
};

// Writes "crash-report.txt" into the attempt's directory: when, where and what
// failed; of each worker that failed its message, its whole stack, and the last
// lines of its log file; and the other files that there are. Returns its path.
// Requires a failure.
//
// Returns an empty path, and writes nothing, if there is neither a stack nor a
// flight record nor a log, so that the launcher's own lines say all; or if the
// file cannot be written.
std::filesystem::path write_crash_report(const FailedAttempt& attempt);

}  // namespace lockstep::internal
