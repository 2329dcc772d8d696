#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/launch/watch/crash_report.h"

namespace lockstep::internal {

// How a job ended, as this node's launcher knows it, for the file that
// `lockstep run --report` writes. docs/failures.md describes the file.
struct JobReport {
  using Time = std::chrono::system_clock::time_point;

  std::string run_id{};
  std::vector<std::string> program{};  // argv
  std::string host{};
  int node_rank = 0;
  int nnodes = 1;
  int world_size = 0;  // of the last attempt; 0 if there was none
  int max_restarts = 0;
  int restarts_used = 0;  // healings included
  int healings = 0;       // of all nodes
  int membership_changes = 0;
  Time started = std::chrono::system_clock::now();
  int exit_code = 0;
  // The forwarded signal that ended the job; 0 if there is none.
  int signal = 0;
  std::string cause{};  // why it did not succeed, in one line; empty if it did
  std::vector<FailedAttempt> failed_attempts{};
  std::vector<HealedFailure> healed{};  // of this node
};

// Writes the report as JSON to another name in the same folder and then renames
// it, so that no reader sees a part of it. Paths are left out if there is
// nothing there any more. Throws std::system_error if it cannot be written.
void write_job_report(const JobReport& report,
                      const std::filesystem::path& file);

}  // namespace lockstep::internal
