#include "tests/launch/launcher.h"

#include <utility>

namespace lockstep::internal::testing {
namespace {

std::vector<std::string> behind(std::vector<std::string> first,
                                const std::vector<std::string>& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

}  // namespace

ProgramResult LauncherTest::run_command(
    const std::vector<std::string>& arguments, ProgramSetup setup) {
  return run_program(behind({LOCKSTEP_BIN_DIR "/lockstep"}, arguments),
                     std::move(setup));
}

std::unique_ptr<RunningProgram> LauncherTest::start(
    const std::vector<std::string>& arguments, ProgramSetup setup) {
  return start_program(behind({LOCKSTEP_BIN_DIR "/lockstep", "run"}, arguments),
                       std::move(setup));
}

std::unique_ptr<RunningProgram> LauncherTest::start_script(
    std::vector<std::string> options, const std::string& script,
    ProgramSetup setup) {
  return start(behind(std::move(options), {"sh", "-c", script}),
               std::move(setup));
}

ProgramResult LauncherTest::run(const std::vector<std::string>& arguments,
                                ProgramSetup setup) {
  return start(arguments, std::move(setup))->finish();
}

ProgramResult LauncherTest::run_script(std::vector<std::string> options,
                                       const std::string& script,
                                       ProgramSetup setup) {
  return start_script(std::move(options), script, std::move(setup))->finish();
}

}  // namespace lockstep::internal::testing
