#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// Which of the host's cores this process may use, how much of their time its
// control groups grant, and how busy they are.
Finding check_cores(const MachineRoots& roots);

// The nodes of a host whose cores reach a part of its memory faster than the
// rest, and which of them this process may use.
Finding check_numa(const MachineRoots& roots);

// How much memory processes can still get, of the host and of the control
// groups of this process.
Finding check_memory(const MachineRoots& roots);

// The size of /dev/shm, and whether it can be written. Lockstep's own shared
// memory is elsewhere, but that of NCCL and of Python's DataLoader lies there.
Finding check_dev_shm(const MachineRoots& roots);

// Whether the system gives the anonymous memory in which the ranks of a host
// exchange tensors. Reserves 4 MiB of it for a moment.
Finding check_shared_memory();

// Whether the kernel gives pages of 2 MiB to the memory of a process, and to
// memory that processes share.
Finding check_huge_pages(const MachineRoots& roots);

// The limits that this process has and its children inherit (setrlimit(2)):
// open files, processes, file size, locked memory, core files. The number of
// processes is also limited by control groups.
std::vector<Finding> check_limits(const MachineRoots& roots);

// The kernel's view of its clock (adjtimex(2)).
struct ClockState {
  bool synchronised = false;
  int64_t most_error_us = 0;  // how wrong it may be
};

// Returns nothing if a sandbox does not let this process ask.
std::optional<ClockState> read_clock();

// Whether the clock of this host follows that of others.
Finding check_clock(const std::optional<ClockState>& clock);

// Whether temporary files can be written where TMPDIR says, and where else they
// go.
Finding check_temporary_files();

}  // namespace lockstep::internal
