#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

struct SpawnOptions {
  // Wait for all processes before spawn() returns. False: the SpawnContext
  // that it returns holds them, so it must be kept: its end kills them.
  bool join = true;

  // Once one process has failed, how long the others may go on before they are
  // stopped, and how long between SIGTERM and SIGKILL: Python's grace_period
  // of ProcessContext.join. Unset: SIGTERM at once, SIGKILL 0.5 s later, as
  // `lockstep run` does (Python leaves 30 s there).
  std::optional<std::chrono::milliseconds> grace_period{};
};

// The process that failed first. what() says rank, pid, which spawn() call
// started it, and the cause: the exception that left fn, with its message (of
// LibTorch's exceptions without the C++ backtrace), or how it ended.
class SpawnError : public std::runtime_error {
 public:
  SpawnError(const std::string& text, int rank, pid_t pid, int exit_code,
             std::optional<int> signal)
      : std::runtime_error(text),
        rank_(rank),
        pid_(pid),
        exit_code_(exit_code),
        signal_(signal) {}

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }  // has ended; may be another's by now
  // 1 where an exception left fn; 128 + signal where a signal ended it; -1
  // where other code of this process took the exit code away (it ignores
  // SIGCHLD, or waits for any child).
  int exit_code() const { return exit_code_; }
  std::optional<int> signal() const { return signal_; }

 private:
  int rank_;
  pid_t pid_;
  int exit_code_;
  std::optional<int> signal_;
};

// The processes of one spawn() call; Python's ProcessContext. Movable; used by
// one thread at a time, which need not be the one that called spawn(). It keeps
// one thread, which waits: the kernel ties the processes' lives to the thread
// that started them.
class SpawnContext {
 public:
  class Processes;

  SpawnContext();  // of no process: joined already
  explicit SpawnContext(std::unique_ptr<Processes> processes);
  SpawnContext(SpawnContext&& other) noexcept;
  // Ends what this one held, as the destructor does.
  SpawnContext& operator=(SpawnContext&& other) noexcept;
  // SIGKILL to every process that has not ended, and reaps it: blocks until it
  // is gone, 5 s at most for one that is stuck in the kernel.
  ~SpawnContext();

  // In the order of the ranks, ended or not.
  std::vector<pid_t> pids() const;

  // Waits for `timeout`, or without one for as long as it takes: true once all
  // processes have ended well, false if some still run. (Python's also returns
  // false at the end of each process; a loop over it does the same here.)
  //
  // If one failed: stops the others (SpawnOptions::grace_period) and throws
  // SpawnError; again at each further call. Of several that have failed by
  // then, one that a signal killed counts as the first, then the one whose fn
  // threw first, then the lowest rank. Errors of communication (c10::DistError,
  // SIGPIPE) are mostly the echo of a peer's end: if there is nothing else, its
  // cause has 1 s to come to light. Waits for its own processes only; other
  // children of this process are left to their owner.
  bool join(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

 private:
  std::unique_ptr<Processes> processes_;
};

// Runs fn(rank) in `nprocs` processes of this program, ranks 0 to nprocs - 1:
// torch.multiprocessing.spawn. fn takes its arguments by capture:
//
//   int main(int argc, char** argv) {
//     Options options = parse(argc, argv);   // runs in every process
//     lockstep::spawn([&](int rank) { train(rank, options); }, 4);
//     std::puts("all four are done");        // runs in the first one only
//   }
//
// Each process executes the program again (/proc/self/exe; the same arguments,
// working directory and environment, as they are now) and runs main() up to
// the same call: the n-th spawn() of the process. There it runs fn(rank) and
// ends; the call does not return. Earlier calls return at once in it, with an
// empty context. So what stands before the call must lead every process there
// again, as Python's `__main__` does; calls from several threads must come in
// the same order in each.
//
// fn finds the environment of a worker of `lockstep run`: RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1), MASTER_PORT (a free
// port, held by this process), OMP_NUM_THREADS=1 where it is unset and nprocs
// is above 1, so that init_process_group() needs nothing more. They replace
// those of a launcher around this process: a spawned world is its own.
//
// stdin is /dev/null, stdout and stderr are this process's; all other
// descriptors are closed. The processes stay in this one's process group (a
// terminal's Ctrl-C reaches all) and die with it, however it dies. No process
// is forked without an immediate exec: other threads may run.
//
// When fn returns, its process ends by std::exit(0): output is flushed and
// statics are destroyed, the variables of main() are not. When an exception
// leaves fn, its process ends at once with code 1, output flushed: statics may
// be waiting for peers that wait for it. When fn calls std::exit(code), that
// is the process's code; 0 is success.
//
// Blocks until all have ended (SpawnOptions::join), and throws as
// SpawnContext::join(). A process that ends without having reached the call
// has failed, whatever its code. Throws std::invalid_argument for nprocs below
// 1, an empty fn, or a call inside the fn of another (spawned processes do not
// spawn), and std::system_error where there is no process, thread, port or
// descriptor to be had, or the program cannot be executed again.
SpawnContext spawn(const std::function<void(int)>& fn, int nprocs = 1,
                   const SpawnOptions& options = {},
                   std::source_location call = std::source_location::current());

}  // namespace lockstep
