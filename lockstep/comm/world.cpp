#include "lockstep/comm/world.h"

#include <stdexcept>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/no_destructor.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/errors.h"

namespace lockstep::internal {
namespace {

std::string lower_case_name(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

// The backend of a rank that makes its groups without the others.
const BackendEntry& imagining_backend() {
  for (const auto& entry : registered_backends()) {
    if (entry.imagines_peers) return entry;
  }
  throw std::logic_error("no backend imagines its peers");
}

GroupInside::Backends connect_backends(
    const NewGroup& group, const GroupMeeting& meeting,
    const c10::intrusive_ptr<WatchedStore>& store) {
  GroupInside::Backends backends;
  for (const auto& [type, named] : resolve_backends(group.config)) {
    const auto* entry = meeting.apart ? &imagining_backend() : named;
    BackendRequest request{.store = c10::make_intrusive<c10d::PrefixStore>(
                               lower_case_name(type) + "/", store),
                           .rank = group.rank,
                           .size = static_cast<int>(group.global_ranks.size()),
                           .timeout = group.timeout,
                           .group_name = group.number,
                           .global_ranks = group.global_ranks,
                           .device_type = type,
                           .meets_within = meeting.timeout};
    try {
      store->require_all_alive();
      backends.emplace(type, entry->create(request));
    } catch (const std::invalid_argument&) {
      throw;  // its text says what is wrong with the arguments
    } catch (const std::exception& error) {
      throw c10::DistBackendError(c10::str(
          "rank ", group.global_ranks[group.rank], " of group '", group.name,
          "' (", request.size, " ranks) could not connect to its peers by \"",
          entry->name, "\" (allowed ", request.time_to_meet().count(),
          " ms): ", words_of(error)));
    }
  }
  return backends;
}

// Returns "cpu:gloo,cuda:nccl".
std::string canonical(const std::string& config) {
  std::string text;
  for (const auto& [type, entry] : resolve_backends(config)) {
    text +=
        (text.empty() ? "" : ",") + lower_case_name(type) + ":" + entry->name;
  }
  return text;
}

}  // namespace

World& world() {
  // Never destroyed: otherwise a group that outlives main() would meet a
  // LibTorch whose statics are gone.
  static NoDestructor<World> instance;
  return *instance;
}

bool is_foreign(const World& world) {
  return world.group && inside(world.group).is_foreign();
}

NewGroup description_of(const ProcessGroup& group) {
  return {.number = group.name() == kDefaultGroupName ? "0" : group.name(),
          .name = group.name(),
          .rank = group.rank(),
          .global_ranks = group.global_ranks(),
          .config = group.backend_config(),
          .timeout = group.timeout(),
          .checks_calls = group.checks_calls()};
}

GroupInside::Generation connect_group(const NewGroup& group,
                                      const GroupMeeting& meeting) {
  const auto watched = c10::make_intrusive<WatchedStore>(
      meeting.store, meeting.life_signs, group.global_ranks, meeting.look);
  try {
    return {
        .store = c10::make_intrusive<c10d::PrefixStore>("lockstep/", watched),
        .life_signs = meeting.life_signs,
        .backends = connect_backends(group, meeting, watched),
        .apart = meeting.apart};
  } catch (const std::exception& error) {
    watched->give_up(c10::str("rank ", group.global_ranks[group.rank],
                              " gave up: ", words_of(error)));
    throw;
  }
}

ProcessGroupPtr make_group(const NewGroup& group, const GroupMeeting& meeting) {
  return ProcessGroupPtr(std::make_shared<GroupInside>(
      group.name, group.rank, group.global_ranks, group.timeout,
      connect_group(group, meeting), canonical(group.config),
      group.checks_calls));
}

c10::intrusive_ptr<c10d::Store> part_of(
    const std::string& number, const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(number + "/", store);
}

std::shared_ptr<LifeSigns> begin_life(
    const Rendezvous& meeting, const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return std::make_shared<LifeSigns>(
        c10::make_intrusive<c10d::PrefixStore>("lockstep/", store),
        meeting.rank, meeting.world_size, meeting.hosted_by_rank_zero,
        meeting.kept_by_launcher ? std::chrono::milliseconds(0)
                                 : LifeSigns::kGrace);
  } catch (const std::exception&) {
    c10::make_intrusive<WatchedStore>(store, nullptr, std::vector<int>())
        ->give_up(c10::str("rank ", meeting.rank,
                           " gave up: ", words_of(std::current_exception())));
    throw;
  }
}

void throw_absent(const char* function, const Rendezvous& meeting,
                  const std::string& absent, const c10::Error& error) {
  throw c10::DistBackendError(
      c10::str(function, ": a world of ", meeting.world_size, ", absent: rank ",
               absent, "; ", error.what_without_backtrace()));
}

}  // namespace lockstep::internal
