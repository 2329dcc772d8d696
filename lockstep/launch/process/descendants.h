#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::internal {

// Makes this process adopt the orphans among its descendants
// (PR_SET_CHILD_SUBREAPER), whatever session or process group they have made
// for themselves. Throws std::system_error.
void adopt_orphans();

// Returns the direct children of this process, read from /proc: those it
// started and those it adopted. Their pids are not reused until this process
// reaps them.
std::vector<pid_t> child_processes();

// Returns whether the kernel says here which processes there are. Without it no
// child is found but those that end.
bool proc_is_mounted();

// A child of this process that a worker has left to it.
struct Leftover {
  pid_t pid = 0;
  pid_t session = 0;
  std::string name{};            // of its program, cut to 15 bytes
  bool ignores_sigterm = false;  // it ends by itself, when its parent has
};
// Returns the children but those `spared`.
std::vector<Leftover> leftovers(const std::set<pid_t>& spared);

// Called for each reaped child with the status from waitpid().
using Reaped = std::function<void(pid_t pid, int wait_status)>;

// Reaps every child that has ended, without waiting. Returns false if no child
// is left, running or ended.
bool reap_children(const Reaped& reaped);

// Ends every descendant of this process, which must have adopted orphans. Sends
// SIGTERM to each child and, after `grace`, SIGKILL to each child and to those
// that are adopted when children die. Returns at once if there is none. `grace`
// is for processes that clean up after a dead parent, such as the resource
// tracker of Python's multiprocessing, which unlinks shared memory.
//
// The children `spared`, and what they have started, are left alone.
//
// Requires SIGCHLD blocked in every thread. Blocks for at most `grace` and 5 s.
// Returns false if a process outlived that (uninterruptible in the kernel).
bool end_descendants(std::chrono::milliseconds grace, const Reaped& reaped,
                     const std::set<pid_t>& spared = {});

}  // namespace lockstep::internal
