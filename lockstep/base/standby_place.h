#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"

// A standby process (`lockstep run --standby`) runs its program up to
// init_process_group() and waits there until the agent gives it the place of a
// worker. This is how the two talk: a socket pair (unix(7), SOCK_SEQPACKET), of
// which the process inherits one end. LOCKSTEP_STANDBY names it by its number
// and its inode, "7:123456", so that no other descriptor of a child is taken
// for it.
//
//   from the process  "waits"       it is in init_process_group()
//                     "read NAME"   its program asked for its place too early
//   from the agent    "place"       with the descriptors of StandbyPlace, the
//                                   first of which holds the environment
//
// In the environment of a standby process no variable is set that differs
// between the ranks of a job or its attempts (RANK, LOCAL_RANK, WORLD_SIZE,
// MASTER_ADDR, ...). A program that asks Lockstep for one of them before
// init_process_group() is refused: get_rank_env() and what calls it, such as
// get_local_rank(), local_device(), and samplers and logs without a group. It
// is *not* noticed that a program asks by itself (std::getenv, environ): it
// finds the variable unset.
namespace lockstep::internal {

constexpr const char* kStandbyVariable = "LOCKSTEP_STANDBY";
constexpr const char* kStandbyWaits = "waits";
constexpr const char* kStandbyRead = "read ";

// Returns whether this process is a standby process without a place. Reads the
// environment, as get_env().
bool stands_by();

// In a standby process: blocks until the agent gives it a place, sets the
// variables of a worker (setenv), and connects stdin, stdout and stderr to
// those of the rank; what was written there before follows. There is no
// deadline: the kernel kills the process when its agent ends. In any other
// process, returns at once.
//
// No other thread may read or change the environment, or use the standard
// streams, while a place is taken. Throws std::invalid_argument if the process
// did not inherit the agent's socket, std::runtime_error if the agent has gone,
// and std::system_error.
void take_place();

// Tells the agent that the program asked for `variable` too early, and throws
// std::invalid_argument.
[[noreturn]] void refuse_early_reader(const std::string& variable);

// ---- The agent's side ----

struct StandbyPlace {
  // Variables that are to be set, "NAME=value".
  std::vector<std::string> environment{};
  // They stay the caller's.
  std::array<int, 3> standard_fds{0, 1, 2};
  int master_listen_fd = -1;  // -1: none
};

// Returns the value of LOCKSTEP_STANDBY for a process that inherits `socket`.
std::string standby_mark(const FileDescriptor& socket);

// Returns a file in memory that takes what a standby process writes to stdout
// or stderr before it has a place. Throws std::system_error.
FileDescriptor early_output_file();

// Sends a place. Returns false if the process is gone. Throws
// std::system_error if the system has no memory or descriptor for it.
bool send_place(const FileDescriptor& socket, const StandbyPlace& place);

}  // namespace lockstep::internal
