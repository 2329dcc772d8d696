#include "lockstep/observe/trace_metadata.h"

#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/host_name.h"
#include "lockstep/comm/existing_groups.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/log_rank.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

// "cpu:gloo" has the backend "gloo"; "cpu:gloo,cuda:nccl" has none by one name,
// and Python then names the map.
std::string backend_name(const std::string& config) {
  const auto colon = config.find(':');
  if (colon == config.npos || config.find(',') != config.npos) return config;
  return config.substr(colon + 1);
}

// Python calls the default group "0" and describes it as "default_pg".
ordered_json config_of(const ProcessGroup& group) {
  const bool is_default = group.name() == kDefaultGroupName;
  return {{"pg_name", is_default ? "0" : group.name()},
          {"pg_desc", is_default ? group.name() : "undefined"},
          {"backend_config", group.backend_config()},
          {"pg_size", group.size()},
          {"ranks", group.global_ranks()}};
}

// A host's name may have bytes that are not UTF-8; the others stay readable.
std::string text_of(const ordered_json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false,
                   ordered_json::error_handler_t::replace);
}

}  // namespace

std::string distributed_info() {
  if (!is_initialized()) return {};
  const auto group = default_group();
  const auto existing = existing_groups();
  auto configs = ordered_json::array();
  for (const auto& one : existing.groups) configs.push_back(config_of(*one));
  return text_of({{"backend", backend_name(group->backend_config())},
                  {"rank", group->rank()},
                  {"world_size", group->size()},
                  {"pg_count", existing.count},
                  {"pg_config", configs}});
}

std::string process_group_config() {
  if (!is_initialized()) return {};
  const int world_size = default_group()->size();
  const auto existing = existing_groups();
  auto configs = ordered_json::array();
  for (const auto& one : existing.groups) {
    auto config = config_of(*one);
    config.erase("pg_size");
    // Python leaves out the ranks of a group of all.
    if (one->size() == world_size) config["ranks"] = ordered_json::array();
    config["group_size"] = one->size();
    config["group_count"] = existing.count;
    configs.push_back(std::move(config));
  }
  return text_of(configs);
}

std::string lockstep_info(const ProcessGroupPtr& group,
                          const ClockOffset& clock) {
  return text_of({{"version", 1},
                  {"rank", group ? group->rank() : log_rank()},
                  {"world_size", group ? group->size() : log_world_size()},
                  {"host", host_name()},
                  {"pid", ::getpid()},
                  {"clock_offset_ns", clock.offset_ns},
                  {"clock_uncertainty_ns", clock.uncertainty_ns}});
}

}  // namespace lockstep::internal
