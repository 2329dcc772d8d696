#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lockstep/launch/watch/job_link.h"

namespace lockstep::internal {

// Adds `lockstep jobs`, which lists the running jobs of this user.
void add_jobs_command(CLI::App& app, int& exit_code);

// Asks each job how it does, and returns a table. A job that does not answer,
// because its agent is stopped, is in it with what is known of it.
std::string jobs_text(const std::vector<RunningJob>& jobs);

}  // namespace lockstep::internal
