#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// A test that starts the `lockstep` of this build.
class LauncherTest : public ProgramTest {
 protected:
  // Runs "lockstep run" with `arguments`.
  ProgramResult run(const std::vector<std::string>& arguments,
                    ProgramSetup setup = {});
  // Runs "lockstep run" with `options`, then "sh -c script".
  ProgramResult run_script(std::vector<std::string> options,
                           const std::string& script, ProgramSetup setup = {});
  std::unique_ptr<RunningProgram> start(
      const std::vector<std::string>& arguments, ProgramSetup setup = {});
  std::unique_ptr<RunningProgram> start_script(std::vector<std::string> options,
                                               const std::string& script,
                                               ProgramSetup setup = {});
  // Runs "lockstep" with any arguments.
  ProgramResult run_command(const std::vector<std::string>& arguments,
                            ProgramSetup setup = {});
};

}  // namespace lockstep::internal::testing
