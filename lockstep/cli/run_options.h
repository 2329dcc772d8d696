#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/run_arguments.h"
#include "lockstep/launch/agent/local_agent.h"
#include "lockstep/launch/agent/metrics_endpoint.h"
#include "lockstep/launch/agent/worker_group.h"
#include "lockstep/launch/nodes/job_member.h"

namespace lockstep::internal {

// The options of `lockstep run`, checked.
struct RunOptions {
  LocalAgentOptions agent{};
  std::optional<JobMemberOptions> job{};  // if there are several nodes
  // How long the name of --master-addr may have no address, if there is one
  // node.
  std::chrono::milliseconds address_timeout{};
  std::optional<std::string> log_dir{};
  std::optional<MetricsOptions> metrics{};
  std::optional<std::filesystem::path> report{};
  // One line for each thing that is accepted but has no effect.
  std::vector<std::string> warnings{};
};

// Returns what the arguments and the environment mean. Finds the program and
// counts the workers, but looks up no address. Throws std::invalid_argument of
// one line that says what was given, what is allowed and what to do;
// ProgramError.
RunOptions run_options(const RunArguments& arguments);

// Returns where and how the nodes meet that these arguments name
// (add_meeting_arguments()); nothing for one node and for a spare one, for
// which nobody waits. Adds to `warnings` as RunOptions has them. Throws as
// run_options().
std::optional<JobMemberOptions> rendezvous_options(
    const RunArguments& arguments, std::vector<std::string>& warnings);

// Returns how a node that cannot start for `reason` tells the other nodes
// (decline_job()). Returns nothing if there is one node, or if these arguments
// do not say where the nodes meet.
std::optional<JobMemberOptions> decline_options(const RunArguments& arguments,
                                                const std::string& reason,
                                                int exit_code);

}  // namespace lockstep::internal
