#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/watch/job_link.h"

namespace lockstep::internal {

// Adds the argument JOB, which names a running job as find_job() takes it.
inline void add_job_argument(CLI::App& command, std::string& job) {
  command
      .add_option("JOB", job, "The job; may be left out if there is only one")
      ->type_name("");
}

// Returns nothing if the argument was left out.
inline std::optional<std::string> job_argument(const std::string& job) {
  return job.empty() ? std::nullopt : std::optional(job);
}

// Asks each job how it does, and returns a table. A job that does not answer,
// because its agent is stopped, is in it with what is known of it.
std::string jobs_text(const std::vector<RunningJob>& jobs);

}  // namespace lockstep::internal
