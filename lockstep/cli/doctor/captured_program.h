#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::internal {

// How a program ended, and what it wrote.
struct CapturedProgram {
  bool in_time = true;  // if not, it was killed
  int exit_code = 0;    // 128 + signal if a signal ended it
  std::string out{};    // stdout and stderr, the first MiB of each
  std::string err{};

  bool succeeded() const { return in_time && exit_code == 0; }
  // Returns the last line of stderr, where programs say why they failed; empty
  // if they said nothing.
  std::string last_line() const;
};

// Runs a program with this environment and without stdin. Blocks until it has
// closed its output and ended, for `allowed` at most, then kills it and its
// process group. It also dies with the calling thread. Throws
// std::system_error if it cannot be started.
CapturedProgram run_captured(const std::filesystem::path& path,
                             const std::vector<std::string>& arguments,
                             std::chrono::milliseconds allowed);

}  // namespace lockstep::internal
