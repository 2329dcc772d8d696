#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/launched_world.h"
#include "lockstep/comm/process_group.h"

// The seam between the core and the backends. A backend is a folder with one
// public function, create(), and one line in register_backends.cpp; the core
// includes none of them.
namespace lockstep {

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // this group's and device type's own
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group_name;
  std::vector<int> global_ranks;
};

struct BackendEntry {
  std::string name;
  // The device types it serves when only its name is given.
  std::vector<c10::DeviceType> default_devices;
  // The device types it can serve at all.
  std::vector<c10::DeviceType> devices;
  // Blocks until the group's ranks are connected; throws c10::DistError.
  std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>
      create;
  // Why it cannot be used in this build or on this machine, and what to do
  // about it; empty if it can. Unset: it always can. May throw
  // std::invalid_argument where the environment is wrong.
  std::function<std::string()> missing{};
  // Where processes learn their places from the backend's own launcher, if no
  // environment, address or store is given. Blocks until all ranks are there,
  // for the given time at most.
  std::function<LaunchedWorld(std::chrono::milliseconds)> world{};
};

// In the order of registration.
const std::vector<BackendEntry>& registered_backends();

// "gloo", "cpu:gloo,cuda:nccl" or "" (by device) as device type -> entry.
// Throws std::invalid_argument that says what was given and what there is, or
// why what was named cannot be used: another is never taken instead. Chosen by
// device are the first of each type that can be used.
std::map<c10::DeviceType, const BackendEntry*> resolve_backends(
    const std::string& config);

}  // namespace lockstep
