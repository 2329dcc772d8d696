#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

// A standby process (`lockstep run --standby`) runs its program up to
// init_process_group() and waits there until the agent gives it the place of a
// worker. This is how the two talk: a socket pair (unix(7), SOCK_SEQPACKET), of
// which the process inherits one end. LOCKSTEP_STANDBY names it
// (descriptor_mark()). A worker of such a launch has a socket, too, which
// LOCKSTEP_STANDBY_SOCKET names: while it is in init_process_group(), the agent
// can call it back, so that it stands by again.
//
//   from the process  "waits"       it stands by in init_process_group()
//                     "read NAME"   its program asked for its place too early
//                     "meets"       it has a place, and waits for other ranks
//                                   at the launcher's store; before that, the
//                                   agent does not call it back
//                     "met"         its group is made; it waits for "leave"
//                     "heals"       see healing_place.h
//   from the agent    "place"       with the descriptors of StandbyPlace, the
//                                   first of which holds the environment.
//                                   " listener" and " memory" follow if it has
//                                   these
//                     "leave"       it may return from init_process_group()
//                     "back A B"    the attempt is over: it stands by again. A
//                                   and B are stream_marks(). Never sent after
//                                   "leave"
//
// So a group can be made while workers of the attempt before still end: nobody
// leaves init_process_group() until they are gone.
//
// In the environment of a standby process no variable is set that differs
// between the ranks of a job or its attempts (RANK, LOCAL_RANK, WORLD_SIZE,
// MASTER_ADDR, ...). A program that asks Lockstep for one of them before
// init_process_group() is refused: get_rank_env() and what calls it, such as
// get_local_rank(), local_device(), and samplers and logs without a group. It
// is *not* noticed that a program asks by itself (std::getenv, environ): it
// finds the variable unset. A worker that was called back may have asked for
// its place, so it gets the same one again or none.
namespace lockstep::internal {

constexpr const char* kStandbyVariable = "LOCKSTEP_STANDBY";
constexpr const char* kStandbySocketVariable = "LOCKSTEP_STANDBY_SOCKET";
constexpr const char* kStandbyWaits = "waits";
constexpr const char* kStandbyRead = "read ";
constexpr const char* kStandbyMeets = "meets";
constexpr const char* kStandbyMet = "met";

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

// Thrown in init_process_group() once the agent has called this process back,
// which is a standby process again then (stands_by()). It is not a
// std::exception, so that no code on its way takes it for an error.
struct CalledBack {};

// The next four do nothing in a process that is not a worker of a launch with
// standby processes. Threads: the one in init_process_group().

// Says that this process waits for other ranks at the launcher's store, so that
// it looks for the agent's words meanwhile (look_for_agent()).
void tell_agent_meets();
// Throws CalledBack if the agent has called this process back.
void look_for_agent();
// Says that the group is made, and blocks until this process may return from
// init_process_group(). Throws CalledBack, and std::runtime_error at the
// deadline.
void await_leave(const Deadline& deadline);
// Returns whether this process stands by again, or the agent calls it back
// within `allowed`. For a process that could not make its group: it may know
// before the agent that a peer is gone.
bool is_called_back(std::chrono::milliseconds allowed);

// ---- The agent's side ----

struct StandbyPlace {
  // Variables that are to be set, "NAME=value".
  std::vector<std::string> environment{};
  // They stay the caller's.
  std::array<int, 3> standard_fds{0, 1, 2};
  int master_listen_fd = -1;  // -1 if there is none
  int memory_fd = -1;         // take_place_memory(); -1 if there is none
};

// Returns what tells two descriptors' files from others: "8:33 8:34".
std::string stream_marks(int stdout_fd, int stderr_fd);

// Returns a file in memory that takes what a standby process writes to stdout
// or stderr before it has a place. Throws std::system_error.
FileDescriptor early_output_file();

// Sends a place. Returns false if the process is gone. Throws
// std::system_error if the system has no memory or descriptor for it.
bool send_place(const FileDescriptor& socket, const StandbyPlace& place);
// Send "leave" and "back". A process that is gone is ignored. `streams` are the
// stream_marks() of the stdout and stderr that the process was given: they go
// to files in memory again, unless the program has put others there.
void send_leave(const FileDescriptor& socket);
void send_back(const FileDescriptor& socket, const std::string& streams);

}  // namespace lockstep::internal
