#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <vector>

namespace lockstep {

// Makes this process the one to which the orphans among its descendants fall
// (PR_SET_CHILD_SUBREAPER), whatever session or process group they made for
// themselves. Throws std::system_error.
void adopt_orphans();

// The direct children of this process, from /proc: those it started and those
// that it adopted. Their numbers stay theirs until this process reaps them.
std::vector<pid_t> child_processes();

// Called with each child reaped and what waitpid() said of it.
using Reaped = std::function<void(pid_t pid, int wait_status)>;

// Reaps every child that has ended, without waiting. False once no child is
// left, ended or not.
bool reap_children(const Reaped& reaped);

// Ends every descendant of this process, which has adopted orphans: SIGTERM,
// then after `grace` SIGKILL to each child and to what is adopted when those
// die. Returns at once when there is none. `grace` is there for processes that
// clean up after a dead parent, such as the resource tracker of Python's
// multiprocessing, which unlinks shared memory.
// Requires SIGCHLD blocked in every thread. Blocks for at most `grace` and
// 5 s; false where a process outlived that (uninterruptible in the kernel).
bool end_descendants(std::chrono::milliseconds grace, const Reaped& reaped);

}  // namespace lockstep
