#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/rendezvous.h"
#include "lockstep/comm/watched_store.h"
#include "lockstep/worker/status_publisher.h"

// Shared by init_process_group(), new_group() and reconfigure(): the
// groups of this process, and how a group is made. Internal to comm.
namespace lockstep::internal {

// The one global of the library: the default group, as in Python, and what new
// groups are made from.
struct World {
  std::mutex mutex{};
  ProcessGroupPtr group{};
  std::optional<Rendezvous> meeting{};
  // The default group's own part of the store ("default_pg", "0/"). The parts
  // of new groups lie in it, as in Python.
  c10::intrusive_ptr<c10d::Store> store{};
  std::shared_ptr<LifeSigns> life_signs{};
  std::unique_ptr<StatusPublisher> status{};
  std::vector<ProcessGroupPtr> subgroups{};
  int group_count = 0;  // names new groups, as Python counts
  // Groups that an exception left with operations pending. A backend's
  // destructor would wait for these, so the groups live until the process ends.
  std::vector<ProcessGroupPtr> aborted{};
  // groups_are_apart()
  bool apart = false;
  // Whether this process, which took the place of one that died, has joined the
  // others: it makes its next default group as they do.
  bool has_joined = false;
};

World& world();

// Whether the groups are those of the process that this one was forked from.
bool is_foreign(const World& world);

// Describes a group that is to be made.
struct NewGroup {
  std::string number;  // Python's name for it; the prefix of its keys
  std::string name;    // the name in messages
  int rank;
  std::vector<int> global_ranks;
  std::string config;
  std::chrono::milliseconds timeout;
  bool checks_calls;
};

// Describes a group that was made, so that it can be made again.
NewGroup description_of(const ProcessGroup& group);

// How the ranks of a new group meet.
struct GroupMeeting {
  // The group's own part of the store. The device types have their parts in
  // that, as in Python's _new_process_group_helper.
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<LifeSigns> life_signs;
  // None means the group's timeout.
  std::optional<std::chrono::milliseconds> timeout{};
  WatchedStore::Look look{};
  // Whether this rank makes the group without the others.
  bool apart = false;
};

// Connects the ranks of a group. If this rank cannot, it tells the others why.
GroupInside::Generation connect_group(const NewGroup& group,
                                      const GroupMeeting& meeting);

// Connects the ranks and makes the group.
ProcessGroupPtr make_group(const NewGroup& group, const GroupMeeting& meeting);

// Returns the part of the store for the group with this number.
c10::intrusive_ptr<c10d::Store> part_of(
    const std::string& number, const c10::intrusive_ptr<c10d::Store>& store);

// Gives the sign of this rank's life, or tells the others why there is none.
std::shared_ptr<LifeSigns> begin_life(
    const Rendezvous& meeting, const c10::intrusive_ptr<c10d::Store>& store);

// Throws what `error` says, after the ranks that have not come to `meeting`.
[[noreturn]] void throw_absent(const char* function, const Rendezvous& meeting,
                               const std::string& absent,
                               const c10::Error& error);

}  // namespace lockstep::internal
