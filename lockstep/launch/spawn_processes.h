#pragma once

#include <signal.h>

#include <exception>
#include <latch>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/launch/spawn_process.h"
#include "lockstep/launch/store_port.h"

namespace lockstep {

// A spawn() call: the n-th of its process, and where it stands.
struct SpawnCall {
  int number = 0;
  std::string file{};
  unsigned line = 0;

  std::string describe() const;  // "spawn() at train.cpp:20"
};

// What LOCKSTEP_SPAWN tells a spawned process. One that such a process starts
// in turn inherits the variable, but is no child of `parent`.
struct SpawnAssignment {
  pid_t parent = 0;
  int rank = 0;
  int report_fd = -1;
  ino_t report_inode = 0;
  SpawnCall call{};

  std::string to_string() const;
  // Nothing where `text` is malformed.
  static std::optional<SpawnAssignment> parse(const std::string& text);
};

// What a SpawnContext holds; see there.
class SpawnContext::Processes {
 public:
  // Starts all, or throws std::system_error and leaves none.
  Processes(const SpawnCall& call, int nprocs, const SpawnOptions& options);
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes();

  std::vector<pid_t> pids() const;
  bool join(std::optional<std::chrono::milliseconds> timeout);

 private:
  void keep(const sigset_t& signal_mask);
  void start_all(const sigset_t& signal_mask);
  void reap_ended();
  size_t running() const;
  // Until all have ended or, if `any`, one more has.
  void wait(const std::optional<Deadline>& deadline, bool any);
  void signal_all(int signal) const;
  bool failed(const SpawnProcess& process) const;
  const SpawnProcess* first_failure() const;
  // The first failure; if it looks like an echo, what comes to light soon.
  const SpawnProcess* await_cause();
  void stop();
  SpawnError error_of(const SpawnProcess& process) const;

  const SpawnCall call_;
  const int nprocs_;
  const SpawnOptions options_;
  StorePort port_;
  std::vector<SpawnProcess> processes_;
  std::optional<SpawnError> error_;
  std::exception_ptr start_error_;
  std::latch started_{1};   // counted down by the keeper
  std::latch released_{1};  // which goes on then
  std::thread keeper_;      // starts the processes, whose lives hang on it
};

}  // namespace lockstep
