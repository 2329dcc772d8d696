#pragma once

#include <sys/types.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {

// Returns the fields of /proc/PID/stat. The name of our programs has no spaces.
std::vector<std::string> stat_fields(pid_t pid);

// A test of one job with standby processes, which is named as the test. Its
// programs run until there is a file "stop" in the folder that they are given.
class StandbyJob : public LauncherTest {
 protected:
  // Starts two workers that run `program SCENARIO FOLDER`.
  std::unique_ptr<RunningProgram> start_job(const std::string& program,
                                            const std::string& scenario,
                                            std::vector<std::string> options,
                                            const std::string& input = "");
  // An agent's socket has as much of it.
  static std::string name();

  nlohmann::json status();
  pid_t pid_of(int local_rank);
  // Waits until `count` standby processes wait, after `restarts` restarts and
  // healings.
  void await_standby(int count, int restarts = 0);
  void kill_worker(int local_rank);
  void stop();
};

}  // namespace lockstep::internal::testing
