#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

// The first worker of a round that failed.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string node{};  // "node 1 (its host)"; empty where there is one
  pid_t pid = 0;
  int exit_code = 0;            // 128 + signal where a signal ended it
  std::optional<int> signal{};  // that signal
  std::chrono::milliseconds lifetime{};
  std::string message{};  // from its error file; empty where it wrote none
};

// The message in an error file of torchrun's form, which Python's @record
// writes: {"message": {"message": "...", ...}} or {"message": "..."}. Shortened
// to 2,000 characters, its control characters replaced. Empty where there is
// no such file or it holds something else: a worker may die while writing it.
std::string read_error_file(const std::filesystem::path& file);

// "rank 9 failed on node 1 (its host): exit code 3".
std::string headline(const WorkerFailure& failure);

// One block for the user, lines parted by '\n', the last without:
//
//   rank 1 failed: killed by SIGSEGV (exit code 139)
//     local rank 1, pid 4242, after 2.3 s, restarts used 0 of 3
//     RuntimeError: what its error file says
std::string describe(const WorkerFailure& failure, int restarts_used,
                     int max_restarts);

}  // namespace lockstep
