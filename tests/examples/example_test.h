#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// How the ranks of an example are started.
struct Launch {
  int ranks = 1;
  int max_restarts = 0;
};

// Runs examples of this build as a user does: alone, under `lockstep run`, or
// under Python's torchrun. Each rank has one thread and no GPU, even if the
// machine has some, because the output names the device. Relative paths are in
// scratch().
class ExampleTest : public ProgramTest {
 protected:
  // `arguments` are the example's name and its arguments.
  std::unique_ptr<RunningProgram> start_alone(
      const std::vector<std::string>& arguments) {
    return start_example({}, arguments);
  }
  std::unique_ptr<RunningProgram> start_ranks(
      const Launch& launch, const std::vector<std::string>& arguments) {
    return start_example(
        {LOCKSTEP_BIN_DIR "/lockstep", "run", "--standalone",
         "--nproc-per-node=" + std::to_string(launch.ranks),
         "--max-restarts=" + std::to_string(launch.max_restarts)},
        arguments);
  }

  ProgramResult run_alone(const std::vector<std::string>& arguments) {
    return start_alone(arguments)->finish(kAllowed);
  }
  ProgramResult run_ranks(const Launch& launch,
                          const std::vector<std::string>& arguments) {
    return start_ranks(launch, arguments)->finish(kAllowed);
  }
  // Starts one rank of several, without a launcher.
  std::unique_ptr<RunningProgram> start_rank(
      const std::vector<std::string>& variables,
      const std::vector<std::string>& arguments) {
    return start_example({}, arguments, variables);
  }

  std::unique_ptr<RunningProgram> start_example(
      std::vector<std::string> launcher,
      const std::vector<std::string>& arguments,
      std::vector<std::string> variables = {}) {
    variables.push_back("OMP_NUM_THREADS=1");
    variables.push_back("CUDA_VISIBLE_DEVICES=");
    launcher.push_back(LOCKSTEP_BIN_DIR "/" + arguments.at(0));
    launcher.insert(launcher.end(), arguments.begin() + 1, arguments.end());
    return start_program(
        launcher, {.environment = std::move(variables), .folder = scratch()});
  }

  static constexpr std::chrono::seconds kAllowed{60};
};

// Returns the only line of `text` that begins with `start`; fails the test and
// returns "" if there is not exactly one.
inline std::string the_line(const std::string& text, const std::string& start) {
  std::string found;
  int number = 0;
  for (const auto& line : lines(text)) {
    if (!line.starts_with(start)) continue;
    found = line;
    ++number;
  }
  EXPECT_EQ(number, 1) << "lines that begin with \"" << start << "\" in:\n"
                       << text;
  return found;
}

}  // namespace lockstep::internal::testing
