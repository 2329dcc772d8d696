#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

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
};

// In the order of registration.
const std::vector<BackendEntry>& registered_backends();

// "gloo", "cpu:gloo,cuda:nccl" or "" (by device) as device type -> entry.
// Throws std::invalid_argument that says what was given and what there is.
std::map<c10::DeviceType, const BackendEntry*> resolve_backends(
    const std::string& config);

}  // namespace lockstep
