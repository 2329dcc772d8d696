#include "lockstep/launch/watch/job_status.h"

#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace lockstep::internal {
namespace {

using nlohmann::json;

constexpr std::array kStates{"waiting", "running", "stopping", "ended"};

json or_null(const std::optional<int>& number) {
  return number ? json(*number) : json(nullptr);
}

std::optional<int> number_in(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<int>();
}

JobStatus::State state_named(const std::string& name) {
  for (size_t i = 0; i < kStates.size(); ++i) {
    if (name == kStates[i]) return static_cast<JobStatus::State>(i);
  }
  throw std::invalid_argument("a job cannot be \"" + name + "\"");
}

}  // namespace

const char* name_of(JobStatus::State state) {
  return kStates[static_cast<size_t>(state)];
}

std::string to_json(const JobStatus& status) {
  json workers = json::array();
  for (const WorkerStatus& worker : status.workers) {
    workers.push_back({{"local_rank", worker.local_rank},
                       {"rank", worker.rank},
                       {"pid", worker.pid},
                       {"exit_code", or_null(worker.exit_code)},
                       {"signal", or_null(worker.signal)},
                       {"publishes", worker.publishes}});
  }
  const json all{{"run_id", status.run_id},
                 {"program", status.program},
                 {"agent_pid", status.agent_pid},
                 {"host", status.host},
                 {"state", name_of(status.state)},
                 {"started_ns", status.started_ns},
                 {"node_rank", status.node_rank},
                 {"nnodes", status.nnodes},
                 {"world_size", status.world_size},
                 {"restart", status.restart},
                 {"healings", status.healings},
                 {"max_restarts", status.max_restarts},
                 {"attempt_directory", status.attempt_directory},
                 {"standby", status.standby},
                 {"workers", workers}};
  // A path or an argument may hold bytes that are not UTF-8.
  return all.dump(-1, ' ', false, json::error_handler_t::replace);
}

JobStatus job_status_of(const std::string& text) {
  try {
    const json all = json::parse(text);
    JobStatus status;
    all.at("run_id").get_to(status.run_id);
    all.at("program").get_to(status.program);
    all.at("agent_pid").get_to(status.agent_pid);
    all.at("host").get_to(status.host);
    status.state = state_named(all.at("state"));
    all.at("started_ns").get_to(status.started_ns);
    all.at("node_rank").get_to(status.node_rank);
    all.at("nnodes").get_to(status.nnodes);
    all.at("world_size").get_to(status.world_size);
    all.at("restart").get_to(status.restart);
    all.at("healings").get_to(status.healings);
    all.at("max_restarts").get_to(status.max_restarts);
    all.at("attempt_directory").get_to(status.attempt_directory);
    all.at("standby").get_to(status.standby);
    for (const json& worker : all.at("workers")) {
      status.workers.push_back({.local_rank = worker.at("local_rank"),
                                .rank = worker.at("rank"),
                                .pid = worker.at("pid"),
                                .exit_code = number_in(worker.at("exit_code")),
                                .signal = number_in(worker.at("signal")),
                                .publishes = worker.at("publishes")});
    }
    return status;
  } catch (const json::exception& error) {
    throw std::invalid_argument(
        std::string("the agent's answer is not the status of a job: ") +
        error.what());
  }
}

}  // namespace lockstep::internal
