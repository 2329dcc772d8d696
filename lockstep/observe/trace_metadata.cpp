#include "lockstep/observe/trace_metadata.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <unistd.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal {
namespace {

// The first round trips wait until rank 0 has come, and make connections.
constexpr int kRoundTrips = 8;
// A tag that programs hardly use, so that these messages do not meet theirs.
constexpr int kTag = kMaxTag - 19;

}  // namespace

ClockOffset measure_clock_offset(const ProcessGroupPtr& group) {
  const UserFunction function("Profiler");
  const at::RecordFunctionGuard unseen(/*is_enabled=*/false);
  const at::NoGradGuard no_grad;
  const auto device = group->control_device();
  // In a dry run the peers do not exist, and nor do their clocks.
  if (inside(group).backend(device.type()).getBackendName() == "fake") {
    return {};
  }
  const PointToPointOptions options{.group = group,
                                    .tag = device.is_cpu() ? kTag : 0};
  auto message = at::zeros({1}, at::TensorOptions(at::kLong).device(device));
  if (group->rank() == 0) {
    for (int peer = 1; peer < group->size(); ++peer) {
      const int global = group->global_rank(peer);
      for (int i = 0; i < kRoundTrips; ++i) {
        recv(message, global, options);
        // On a GPU the message may still be on its way.
        if (!device.is_cpu()) (void)message.item<int64_t>();
        message.fill_(c10::getTime());  // as Kineto writes times
        send(message, global, options);
      }
    }
    return {};
  }
  const int first = group->global_rank(0);
  ClockOffset best{.offset_ns = 0,
                   .uncertainty_ns = std::numeric_limits<int64_t>::max()};
  for (int i = 0; i < kRoundTrips; ++i) {
    const int64_t asked = c10::getTime();
    send(message, first, options);
    recv(message, first, options);
    const auto answer = message.item<int64_t>();
    const int64_t answered = c10::getTime();
    // Rounded up, so that the bound holds.
    const int64_t uncertainty = (answered - asked + 1) / 2;
    if (uncertainty >= best.uncertainty_ns) continue;
    best = {.offset_ns = answer - (asked + (answered - asked) / 2),
            .uncertainty_ns = uncertainty};
  }
  return best;
}

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
