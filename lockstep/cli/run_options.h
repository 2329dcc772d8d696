#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/run_arguments.h"
#include "lockstep/launch/job_member.h"
#include "lockstep/launch/local_agent.h"

namespace lockstep {

// What `lockstep run` was asked for.
struct RunOptions {
  LocalAgentOptions agent{};
  std::optional<JobMemberOptions> job{};  // where there are several nodes
  std::optional<std::string> log_dir{};
  // What is accepted and has no effect; a line each.
  std::vector<std::string> warnings{};
};

// The meaning of the arguments and of the environment. Finds the program and
// counts the workers; does not look any address up. Throws
// std::invalid_argument of one line that says what was given, what is allowed
// and what to do; ProgramError.
RunOptions run_options(const RunArguments& arguments);

// How a node of several that cannot start for `reason` tells the others
// (decline_job()). Nothing if there is one node, or if these arguments do not
// say where the nodes meet.
std::optional<JobMemberOptions> decline_options(const RunArguments& arguments,
                                                const std::string& reason,
                                                int exit_code);

}  // namespace lockstep
