#pragma once

#include <filesystem>

#include "lockstep/launch/process/control_groups.h"

namespace lockstep::internal {

// The folders in which the kernel describes the machine. Tests give others.
struct MachineRoots {
  std::filesystem::path proc = "/proc";
  std::filesystem::path sys = "/sys";
  std::filesystem::path dev = "/dev";

  ControlGroupPlace control_groups() const {
    return {.root = sys / "fs/cgroup", .membership = proc / "self/cgroup"};
  }
};

}  // namespace lockstep::internal
