#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The world of a process, as it is described, without any environment, by a
// launcher that has its own means of communication (mpirun). Internal to comm.
struct LaunchedWorld {
  int rank;
  int size;
  bool one_host;
  // Returns rank 0's text on every rank, 500 characters at most; the texts of
  // the others are ignored. Each rank calls it once. Blocks until rank 0 has
  // called it; throws c10::DistBackendError when the time for that is over.
  std::function<std::string(const std::string&)> from_rank_zero;
};

// The seam between the core and the backends. A backend is a folder with one
// public function, create(), and one entry in register_backends.cpp; the core
// includes no header of a backend.

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // for this group and device type only
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group_name;
  std::vector<int> global_ranks;
  c10::DeviceType device_type = c10::kCPU;  // of the tensors
  // How long to wait for the other ranks; none means `timeout`.
  std::optional<std::chrono::milliseconds> meets_within{};

  std::chrono::milliseconds time_to_meet() const {
    return meets_within.value_or(timeout);
  }

  // The ranks of the group, as they meet in `store`.
  StoreMembers members() const {
    return {.store = *store, .rank = rank, .global_ranks = global_ranks};
  }
};

struct BackendEntry {
  std::string name;
  // The device types that it serves if only its name is given.
  std::vector<c10::DeviceType> default_devices;
  // The device types it can serve at all.
  std::vector<c10::DeviceType> devices;
  // Blocks until the group's ranks are connected; throws c10::DistError.
  std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>
      create;
  // Returns why the backend cannot be used in this build or on this machine,
  // and what to do about it; an empty string if it can be used. Unset if it can
  // always be used. May throw std::invalid_argument if the environment is
  // wrong.
  std::function<std::string()> missing{};
  // Asks the backend's own launcher (mpirun) for this process's rank and the
  // world size. Called if neither the options nor the environment name a rank,
  // a world size, an address or a store. Blocks until all ranks have come, for
  // the given time at most. Unset if the backend has no launcher of its own.
  std::function<LaunchedWorld(std::chrono::milliseconds)> world{};
  // Whether the backend only pretends that the other ranks exist (fake/): its
  // operations exchange nothing. A world of such backends alone has one
  // process, so nothing waits for another rank. Never chosen by device.
  bool imagines_peers = false;
  // Whether Python has the same backend, so that ranks of Python's
  // torch.distributed may be in the group.
  bool python_may_join = false;
  // Whether a backend that was aborted can be destroyed at once, also with
  // operations pending, and another one made for the same ranks
  // (reconfigure.h).
  bool can_be_made_again = false;
};

// Returns the backends in the order in which they are registered, Lockstep's
// own first (register_backend.h adds others). The entries stay where they are.
std::deque<BackendEntry>& registered_backends();

// Parses `config`, which is "gloo", "cpu:gloo,cuda:nccl" or "" (choose by
// device), into device type -> entry. Throws std::invalid_argument that says
// what was given and what is allowed, or why a backend that was named cannot be
// used: another one is never taken instead. Choosing by device takes the first
// registered backend of each type that can be used.
std::map<c10::DeviceType, const BackendEntry*> resolve_backends(
    const std::string& config);

// Whether a group with the backends of `config`, which is as for
// resolve_backends(), may have ranks of Python's torch.distributed.
bool python_may_join(const std::string& config);

// Whether all backends of `config`, which is as for resolve_backends(), only
// pretend that the other ranks exist. Code that waits for something that
// another rank writes must ask first.
bool imagines_peers(const std::string& config);
// The same for the group's backends; also for those of a group that is apart
// (groups_are_apart()).
bool imagines_peers(const ProcessGroup& group);

}  // namespace lockstep::internal
