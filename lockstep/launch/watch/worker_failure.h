#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/worker/error_file.h"

namespace lockstep::internal {

// The contents of an error file.
struct ErrorRecord {
  FailureKind kind = FailureKind::unknown;
  std::string message{};
  // When the error was thrown. Python's record has whole seconds, rounded down;
  // for it this is the end of that second.
  std::optional<std::chrono::system_clock::time_point> time{};
  // If the file cannot be understood, why: "is empty; is the disk full?". The
  // other members are empty then.
  std::string unreadable{};
  // The ranks that an echo names as those that failed or left before.
  std::set<int> named{};
};

// The words of echoes about the ranks that they name: "rank 0: all_reduce #5
// ...".
using NamedRanks = std::map<int, std::string>;

// The last lines of a log file of a worker.
struct LogTail {
  std::filesystem::path file{};
  std::vector<std::string> lines{};
};

// A worker that failed.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string node{};  // "node 1 (its host)"; empty if there is one
  pid_t pid = 0;
  int exit_code = 0;            // 128 + signal if a signal ended it
  std::optional<int> signal{};  // that signal
  // The launcher was already stopping this worker when it ended, but its error
  // file says that it had failed before.
  bool was_stopped = false;
  // The launcher ended it because it made no progress; `error` says more.
  bool hung = false;
  // The echoes of other ranks name it, and it does not say itself what was
  // wrong: it left its group while they used it. What one of them said; empty
  // if none did.
  std::string named_by{};
  std::chrono::milliseconds lifetime{};
  std::chrono::system_clock::time_point ended{};
  ErrorRecord error{};  // empty if it wrote none
  // The frames of the thread that a fatal signal ended (worker/error_file.h),
  // or of the main thread if it hung, the innermost first; empty if it wrote
  // none. A frame is frame_line() (native_stack.h), or the same for people
  // (SourceFinder::texts()).
  std::vector<std::string> stack{};
  std::filesystem::path folder{};  // of its files, below that of the attempt
  std::vector<LogTail> logs{};     // of those that are not empty
  // The last line that it wrote through the launcher (--prefix-lines); empty if
  // its output goes elsewhere.
  std::string last_line{};

  // When the worker failed: when its error file says so, but at the latest when
  // it ended.
  std::chrono::system_clock::time_point time() const {
    return error.time ? std::min(*error.time, ended) : ended;
  }
};

// A worker that failed while the others went on (worker/healing_place.h), and
// the process that took its place; 0 if the place was given up.
struct HealedFailure {
  int generation = 0;  // that began with it
  WorkerFailure failure{};
  pid_t pid = 0;
};

// Returns whether `one` is more likely than `other` to be the cause that ended
// the attempt. One that others name comes first, however it ended. Then a
// failure that is known to be a cause comes before one of which nothing is
// known, and an echo comes last; then the earlier one; at the same moment, one
// that a signal killed, then the lower rank.
bool comes_before(const WorkerFailure& one, const WorkerFailure& other);

// Reads an error file of torchrun's form: Lockstep's (worker/error_file.h), or
// what Python's @record writes, which has no "time_ns" and no "kind", or is
// just {"message": "..."}. The message is shortened to 2,000 characters and its
// control characters are replaced. The result is empty if there is no such
// file, and `unreadable` if it holds something else: a worker may die while it
// writes the file.
ErrorRecord read_error_file(const std::filesystem::path& file);

// Returns the ranks that the message of an echo names as those that failed or
// left before: "rank 7 has left the group", "rank 7 died".
std::set<int> ranks_named_in(const std::string& message);

// Returns "rank 9 failed on node 1 (its host): " and the first line of its
// message, or else how it ended: "exit code 3"; "hung" instead of "failed" if
// it made no progress. How it ended also comes first if a signal killed it and
// that is not the end of an exception which nobody caught.
std::string headline(const WorkerFailure& failure);
// Returns what headline() leaves out, in lines separated by '\n': how the
// worker ended, and the rest of its message.
std::string details(const WorkerFailure& failure);

// Failures whose headlines and first lines differ in the rank and in times
// only; in the order of the first of them.
struct AlikeFailures {
  std::vector<const WorkerFailure*> all{};
};
std::vector<AlikeFailures> alike(std::span<const WorkerFailure> failures);
// Returns the headline of the first, for all: "ranks 0 and 2-7 failed: ...",
// with the first line of its message, if the headline does not have it.
std::string summary(const AlikeFailures& failures);

// Returns one block for the user, lines separated by '\n', the last one
// without. `failures` are sorted by comes_before() and not empty:
//
//   rank 1 failed: std::runtime_error: what its error file says
//     local rank 1, pid 4242, after 2.3 s, restarts used 0 of 3
//     killed by SIGABRT (exit code 134)
//     in train(at::Tensor const&) at train.cpp:57
//     in ... (its stack from the program's first frame on, shown_frames())
//     then ranks 0 and 2-7 failed: the first line of their message
std::string describe(const std::vector<WorkerFailure>& failures,
                     int restarts_used, int max_restarts);

}  // namespace lockstep::internal
