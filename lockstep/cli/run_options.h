#pragma once

#include <optional>

#include "lockstep/cli/run_arguments.h"
#include "lockstep/launch/job_member.h"
#include "lockstep/launch/local_agent.h"

namespace lockstep {

// What `lockstep run` was asked for.
struct RunOptions {
  LocalAgentOptions agent{};
  std::optional<JobMemberOptions> job{};  // where there are several nodes
  std::optional<std::string> log_dir{};
};

// The meaning of the arguments and of the environment. Finds the program and
// counts the workers; does not look any address up. Throws
// std::invalid_argument of one line that says what was given, what is allowed
// and what to do; ProgramError.
RunOptions run_options(const RunArguments& arguments);

}  // namespace lockstep
