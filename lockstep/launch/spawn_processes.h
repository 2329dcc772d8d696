#pragma once

#include <signal.h>

#include <exception>
#include <latch>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/store_port.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/launch/spawn_report.h"
#include "lockstep/launch/watch/worker_failure.h"

namespace lockstep::internal {

// A spawn() call: its number in its process, and its place in the source.
struct SpawnCall {
  int number = 0;
  std::string file{};
  unsigned line = 0;

  std::string describe() const;  // "spawn() at train.cpp:20"
};

// The value of LOCKSTEP_SPAWN for a spawned process. A process that this one
// starts in turn inherits the variable, but ignores it, as it is not a child of
// `parent`.
struct SpawnAssignment {
  static constexpr const char* kVariable = "LOCKSTEP_SPAWN";

  pid_t parent = 0;
  int rank = 0;
  int report_fd = -1;
  ino_t report_inode = 0;
  SpawnCall call{};

  std::string to_string() const;
  // Returns nothing if `text` is malformed.
  static std::optional<SpawnAssignment> parse(const std::string& text);
};

// One spawned process, held by the process that started it.
struct SpawnedRank {
  int rank = 0;
  ChildProcess process;
  SpawnReport report;
};

// The processes that a SpawnContext holds (spawn.h).
class SpawnProcesses {
 public:
  // Starts all processes, or throws std::system_error and leaves none.
  SpawnProcesses(const SpawnCall& call, int nprocs,
                 const SpawnOptions& options);
  SpawnProcesses(const SpawnProcesses&) = delete;
  SpawnProcesses& operator=(const SpawnProcesses&) = delete;
  ~SpawnProcesses();

  std::vector<pid_t> pids() const;
  bool join(std::optional<std::chrono::milliseconds> timeout);

 private:
  void keep(const sigset_t& signal_mask);
  void start_all(const sigset_t& signal_mask);
  void reap_ended();
  size_t running() const;
  // Waits until all processes have ended or, if `any`, one more has.
  void wait(const std::optional<Deadline>& deadline, bool any);
  void signal_all(int signal) const;
  // Ends all processes with SIGKILL. Blocks until the kernel has ended them.
  void kill_all();
  // Returns what echoes say of the ranks that they name.
  NamedRanks named_ranks() const;
  // Returns the first failure in the order of comes_before(). `or_named`: a
  // rank that echoes name counts although it runs.
  std::optional<WorkerFailure> first_failure(bool or_named) const;
  // Returns the first failure. If that looks like an echo, waits a short time
  // for its cause and returns that, or the rank that the echo names.
  std::optional<WorkerFailure> await_cause();
  void stop();
  // `was_running`: it had not ended when it was stopped.
  SpawnError error_of(const SpawnedRank& spawned, bool was_running) const;

  const SpawnCall call_;
  const int nprocs_;
  const SpawnOptions options_;
  StorePort port_;
  std::vector<SpawnedRank> ranks_;
  std::optional<SpawnError> error_;
  std::exception_ptr start_error_;
  std::latch started_{1};   // the keeper has started the processes, or failed
  std::latch released_{1};  // the keeper may end
  std::thread keeper_;      // starts the processes, which die if it ends
};

}  // namespace lockstep::internal
