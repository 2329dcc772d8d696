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

// The options of torch.multiprocessing.spawn (PyTorch documentation) that have
// a meaning here, and grace_period.
struct SpawnOptions {
  // Whether spawn() waits for all processes before it returns. If false, it
  // returns a SpawnContext that holds them and must be kept: its destructor
  // kills them. Set it to false if this process has other work to do meanwhile.
  bool join{true};

  // After one process has failed: how long the others may go on before they get
  // SIGTERM, and again how long until they get SIGKILL. This is grace_period of
  // Python's ProcessContext.join. Set it if the processes save something when
  // they get SIGTERM. More than 0. None means SIGTERM at once and SIGKILL 0.5 s
  // later, as `lockstep run` does (Python waits 30 s there).
  std::optional<std::chrono::milliseconds> grace_period{};
};

// Thrown for the process that failed first. what() names its rank, its pid, the
// spawn() call that started it, and the cause: the exception that left fn, with
// its message (if it is LibTorch's, without the C++ backtrace), or how the
// process ended.
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
  pid_t pid() const { return pid_; }  // has ended; may be reused
  // The code with which the process ended: 1 if an exception left fn; 128 +
  // signal if a signal ended the process. -1 if other code of this process took
  // the exit code (it ignores SIGCHLD, or waits for any child).
  int exit_code() const { return exit_code_; }
  std::optional<int> signal() const { return signal_; }

 private:
  int rank_;
  pid_t pid_;
  int exit_code_;
  std::optional<int> signal_;
};

namespace internal {
class SpawnProcesses;
}

// The processes of one spawn() call, like Python's ProcessContext. Movable. One
// thread at a time may use it, not necessarily the one that called spawn(). It
// keeps one thread that starts the processes and then only waits, because the
// kernel ties their lives to the thread that started them.
class SpawnContext {
 public:
  SpawnContext();  // holds no process: join() returns true
  explicit SpawnContext(std::unique_ptr<internal::SpawnProcesses> processes);
  SpawnContext(SpawnContext&& other) noexcept;
  // Ends the processes that this context held, as the destructor does.
  SpawnContext& operator=(SpawnContext&& other) noexcept;
  // Sends SIGKILL to every process that has not ended, and reaps it. Blocks
  // until it is gone, for at most 5 s if it is stuck in the kernel.
  ~SpawnContext();

  // Returns the pids in the order of the ranks, also of processes that have
  // ended.
  std::vector<pid_t> pids() const;

  // Waits for `timeout`, or without one as long as it takes. Returns true once
  // all processes have ended well, false if some still run. (Python's join()
  // also returns false when any one process ends; a loop around it does the
  // same here.)
  //
  // If a process has failed, stops the others (SpawnOptions::grace_period) and
  // throws SpawnError, again at each further call. If several have failed by
  // then, one that the errors of others name ("rank 7 has left the group")
  // counts as the first, however it ended; then one that a signal killed, then
  // the one whose fn threw first, then the lowest rank. Communication errors
  // (c10::DistError, SIGPIPE) are mostly the echo of a peer's end, also if fn
  // catches them and calls std::exit(): if there is no other failure yet, its
  // cause has 1 s to become known. Waits for its own processes only, and reaps
  // no other child of this process.
  bool join(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

 private:
  std::unique_ptr<internal::SpawnProcesses> processes_;
};

// Runs fn(rank) in `nprocs` processes of this program, ranks 0 to nprocs - 1,
// like torch.multiprocessing.spawn. fn gets its arguments by capture:
//
//   int main(int argc, char** argv) {
//     Options options = parse(argc, argv);   // runs in every process
//     lockstep::spawn([&](int rank) { train(rank, options); }, 4);
//     std::puts("all four are done");        // runs in the first one only
//   }
//
// Each process executes the program again (/proc/self/exe; with the arguments,
// working directory and environment that this process has now) and runs main()
// up to the same call, the n-th spawn() of the process. There it runs fn(rank)
// and ends; the call does not return. Earlier calls return at once in that
// process, with an empty context. So the code before the call must lead every
// process there again, as with Python's `__main__`. Calls from several threads
// must come in the same order in every process.
//
// fn has the environment of a worker of `lockstep run`: RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1), MASTER_PORT (a free
// port, held by this process), and OMP_NUM_THREADS=1 if it is unset and nprocs
// is above 1. So init_process_group() needs nothing more. These variables
// replace those of a launcher around this process: a spawned world is a world
// of its own.
//
// stdin is /dev/null; stdout and stderr are those of this process; all other
// descriptors are closed. The processes stay in the process group of this one
// (a terminal's Ctrl-C reaches all) and die with it, however it dies. Other
// threads may run during the call: no process is forked without an immediate
// exec.
//
// When fn returns, its process ends by std::exit(0): output is flushed and
// statics are destroyed, but not the variables of main(). When an exception
// leaves fn, its process flushes output and ends at once with code 1: it does
// not destroy statics, which may wait for peers that wait for this process.
// When fn calls std::exit(code), the process ends with that code; 0 is success.
//
// Blocks until all processes have ended (see SpawnOptions::join), and throws
// what SpawnContext::join() throws. A process that ends before it has reached
// the call has failed, whatever its code. Throws std::invalid_argument for
// nprocs below 1, an empty fn, a grace_period of 0 or less, or a call inside
// the fn of another spawn() (spawned processes cannot spawn); std::system_error
// if no process, thread, port or descriptor is available, or if the program
// cannot be executed again; std::runtime_error if /proc is not mounted.
SpawnContext spawn(const std::function<void(int)>& fn, int nprocs = 1,
                   const SpawnOptions& options = {},
                   std::source_location call = std::source_location::current());

}  // namespace lockstep
