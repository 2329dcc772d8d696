// The program that spawn_test.cpp starts: `spawn_program MODE [ARGUMENT...]`.
// The test checks its output. Its ranks run main() again, as a user's do.
#include "lockstep/launch/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/worker/error_file.h"

// The name is that of LibTorch's error when a peer has ended.
namespace c10 {
struct DistBackendError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
}  // namespace c10

namespace {

using lockstep::spawn;
using lockstep::SpawnContext;
using lockstep::SpawnError;
using lockstep::SpawnOptions;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Arguments = std::vector<std::string>;

// The parent may not have ended yet when a test looks for processes that it
// left behind, so no rank stays longer than this.
void stay() {
  ::alarm(60);
  while (true) ::pause();
}

bool is_spawned() { return ::getenv("LOCKSTEP_SPAWN") != nullptr; }

// Writes the line at once, so that lines of several ranks do not mix.
void say(const std::string& line) {
  const std::string text = line + "\n";
  [[maybe_unused]] auto written =
      ::write(STDOUT_FILENO, text.data(), text.size());
}

// Ranks wait at the gate until the parent opens it.
class Gate {
 public:
  explicit Gate(std::string path) : path_(std::move(path)) {
    ::mkfifo(path_.c_str(), 0600);
  }
  void open() { fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC); }
  void await() const { ::close(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)); }

 private:
  std::string path_;
  int fd_ = -1;
};

void print_error(const std::exception& error) {
  if (auto* failure = dynamic_cast<const SpawnError*>(&error)) {
    say("SpawnError rank " + std::to_string(failure->rank()) + " exit code " +
        std::to_string(failure->exit_code()) + " signal " +
        (failure->signal() ? std::to_string(*failure->signal()) : "none") +
        (::kill(failure->pid(), 0) != 0 ? " gone" : " still there"));
  }
  say(std::string("what: ") + error.what());
}

volatile sig_atomic_t terminated = 0;

void on_terminate(int) { terminated = 1; }

// Waits for SIGTERM; calls `ready` when it can receive it.
void await_terminate(const std::function<void()>& ready) {
  sigset_t blocked;
  sigset_t before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  ::signal(SIGTERM, on_terminate);
  ready();
  ::alarm(60);
  while (terminated == 0) sigsuspend(&before);
}

// --- what ranks see -------------------------------------------------------

void environment(const Arguments& arguments) {
  std::string own;
  for (const auto& argument : arguments) own += "<" + argument + ">";
  spawn(
      [&](int rank) {
        std::string line = "rank " + std::to_string(rank) + own;
        for (const char* name :
             {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
              "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE",
              "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
              "KEPT"}) {
          const char* value = ::getenv(name);
          line += std::string(" ") + name + "=" + (value ? value : "(unset)");
        }
        const bool port = std::atoi(::getenv("MASTER_PORT")) > 1023;
        const char* listen = ::getenv("LOCKSTEP_MASTER_LISTEN_FD");
        struct stat status {};
        const bool socket = listen != nullptr &&
                            ::fstat(std::atoi(listen), &status) == 0 &&
                            S_ISSOCK(status.st_mode);
        char byte = 0;
        const bool no_input = ::read(STDIN_FILENO, &byte, 1) == 0;
        say(line + (port ? " port" : " no port") +
            (socket   ? " socket"
             : listen ? " stray socket"
                      : " no socket") +
            (no_input ? " no input" : " input"));
      },
      std::atoi(arguments.at(0).c_str()));
  say("joined");
}

struct AtExit {
  ~AtExit() {
    if (speaks) std::fputs("static destroyed\n", stdout);
  }
  bool speaks = false;
};
AtExit at_exit;

void statics(const Arguments&) {
  spawn(
      [](int) {
        at_exit.speaks = true;
        std::fputs("buffered, ", stdout);
      },
      1);
}

void descriptors(const Arguments&) {
  if (!is_spawned()) ::dup2(STDOUT_FILENO, 77);
  spawn([](int) { say(::fcntl(77, F_GETFD) < 0 ? "closed" : "open"); }, 1);
}

// --- errors ---------------------------------------------------------------

void bad_arguments(const Arguments&) {
  for (const int nprocs : {0, -3}) {
    try {
      spawn([](int) {}, nprocs);
    } catch (const std::invalid_argument& error) {
      print_error(error);
    }
  }
  try {
    spawn(nullptr, 2);
  } catch (const std::invalid_argument& error) {
    print_error(error);
  }
  try {
    spawn([](int) {}, 2, {.grace_period = std::chrono::milliseconds(0)});
  } catch (const std::invalid_argument& error) {
    print_error(error);
  }
}

// Rank 1 runs `action`, the others stay until they are stopped.
void fail(const Arguments& arguments) {
  const std::string action = arguments.at(0);
  spawn(
      [&](int rank) {
        if (rank != 1) stay();
        if (action == "throw") throw std::invalid_argument("no such file");
        if (action == "throw-int") throw 42;
        if (action == "throw-much") {
          throw std::runtime_error(std::string(1 << 20, 'x'));
        }
        if (action == "exit") std::exit(std::atoi(arguments.at(1).c_str()));
        if (action == "signal") {
          ::raise(std::atoi(arguments.at(1).c_str()));
        }
        if (action == "spawn") spawn([](int) { say("never"); }, 2);
        if (action == "close") ::close(STDOUT_FILENO);
      },
      3);
}

void exit_zero(const Arguments&) {
  spawn([](int) { std::exit(0); }, 2);
  say("success");
}

struct CrashAtExit {
  ~CrashAtExit() {
    if (armed) ::raise(SIGABRT);
  }
  bool armed = false;
};
CrashAtExit crash;

void crash_at_exit(const Arguments&) {
  spawn([](int) { crash.armed = true; }, 1);
}

void end_before(const Arguments& arguments) {
  if (is_spawned()) std::exit(std::atoi(arguments.at(0).c_str()));
  spawn([](int) { say("never"); }, 2);
}

void other_call(const Arguments&) {
  if (is_spawned()) spawn([](int) { say("never"); }, 1);
  spawn([](int) { say("never"); }, 1);
}

void close_report(const Arguments&) {
  if (is_spawned()) {
    for (int fd = 3; fd < 64; ++fd) ::close(fd);
  }
  spawn([](int) { say("never"); }, 1);
}

void cannot_execute(const Arguments& arguments) {
  ::chmod(arguments.at(0).c_str(), 0600);
  spawn([](int) { say("never"); }, 2);
}

// Rank 0 fails as an echo of rank 1, when it is told to stop.
void echo(const Arguments& arguments) {
  const Gate gate(arguments.at(0));
  spawn(
      [&](int rank) {
        if (rank == 0) {
          await_terminate([&] { Gate(gate).open(); });
          throw std::runtime_error("the echo");
        }
        gate.await();
        throw std::runtime_error("the cause");
      },
      2);
}

// Rank 0 fails because rank 1 does, but ends first.
void echo_first(const Arguments& arguments) {
  Gate gate(arguments.at(0));
  const std::string how = arguments.at(1);
  auto processes = spawn(
      [&](int rank) {
        const std::string left = "rank 1 has left the group";
        if (rank == 0 && how == "signal") ::raise(SIGPIPE);
        if (rank == 0 && how == "caught") {
          lockstep::internal::note_failure(
              lockstep::internal::FailureKind::echo,
              "all_reduce #5 failed: " + left);
          std::exit(5);
        }
        if (rank == 0) {
          throw c10::DistBackendError(how == "signal" || how == "exception" ||
                                              how == "alone"
                                          ? "connection closed by peer"
                                          : left);
        }
        gate.await();
        if (how == "alone" || how == "stays") stay();
        if (how == "exits" || how == "caught") std::exit(3);
        if (how == "returns") return;
        throw std::runtime_error("the cause");
      },
      2, {.join = false});
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(processes.pids().at(0)), &info,
           WEXITED | WNOWAIT);
  gate.open();
  // It has a second to end, which may be too short on a busy machine.
  if (how == "exits" || how == "returns" || how == "caught") {
    ::waitid(P_PID, static_cast<id_t>(processes.pids().at(1)), &info,
             WEXITED | WNOWAIT);
  }
  processes.join();
}

// Both ranks have failed before the parent looks: first rank 1, then rank 0.
void both_fail(const Arguments& arguments) {
  Gate gate(arguments.at(0));
  const int signal = std::atoi(arguments.at(1).c_str());
  auto processes = spawn(
      [&](int rank) {
        if (rank == 1) throw std::runtime_error("the first");
        gate.await();
        if (signal != 0) ::raise(signal);
        throw std::runtime_error("the second");
      },
      2, {.join = false});
  const auto await_end = [](pid_t pid) {
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  };
  await_end(processes.pids().at(1));
  gate.open();
  await_end(processes.pids().at(0));
  processes.join();
}

// --- stopping the others --------------------------------------------------

void grace(const Arguments& arguments) {
  const Gate gate(arguments.at(0));
  SpawnOptions options;
  if (arguments.size() > 2) {
    options.grace_period = milliseconds(std::atoi(arguments[2].c_str()));
  }
  const std::string how = arguments.at(1);
  spawn(
      [&](int rank) {
        if (rank == 1) {
          gate.await();
          throw std::runtime_error("over");
        }
        if (how == "stubborn") {
          ::signal(SIGTERM, SIG_IGN);
          Gate(gate).open();
          stay();
        }
        if (how == "by-itself") {
          Gate(gate).open();
          std::this_thread::sleep_for(milliseconds(300));
          say("done by itself");
          return;
        }
        await_terminate([&] { Gate(gate).open(); });
        say("cleaned up");
      },
      2, options);
}

// --- contexts -------------------------------------------------------------

void context(const Arguments& arguments) {
  Gate gate(arguments.at(0));
  SpawnContext processes = spawn(
      [&](int rank) {
        gate.await();
        say("rank " + std::to_string(rank) + " passed");
      },
      2, {.join = false});
  say(std::to_string(processes.pids().size()) + " processes");
  say(processes.join(milliseconds(0)) ? "joined at once" : "not yet");
  say(processes.join(milliseconds(50)) ? "joined early" : "not yet");
  gate.open();
  SpawnContext moved = std::move(processes);
  // NOLINTNEXTLINE(bugprone-use-after-move): that is what is tested
  say(processes.pids().empty() ? "nothing left behind" : "not moved");
  say(moved.join() && moved.join() ? "joined" : "never joined");
}

void context_error(const Arguments&) {
  auto processes =
      spawn([](int rank) { std::exit(rank == 0 ? 0 : 5); }, 2, {.join = false});
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      processes.join();
    } catch (const SpawnError& error) {
      print_error(error);
    }
  }
}

void drop(const Arguments&) {
  std::vector<pid_t> pids;
  {
    auto processes = spawn([](int) { stay(); }, 3, {.join = false});
    pids = processes.pids();
    for (const pid_t pid : pids) {
      if (::kill(pid, 0) != 0) say("not there");
    }
  }
  for (const pid_t pid : pids) {
    if (::kill(pid, 0) == 0) say("still there");
  }
  say("dropped");
}

// The kernel ties a process's life to the thread that started it; this must not
// be the user's thread.
void thread_that_ends(const Arguments& arguments) {
  Gate gate(arguments.at(0));
  SpawnContext processes;
  std::thread starter([&] {
    processes = spawn([&](int) { gate.await(); }, 2, {.join = false});
  });
  starter.join();
  if (processes.join(milliseconds(100))) say("joined early");
  gate.open();
  processes.join();
  say("joined");
}

void threads(const Arguments&) {
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3 && !is_spawned(); ++i) {
    busy.emplace_back([&] {
      while (!over) std::string(4096, 'x').append("y");
    });
  }
  for (int round = 0; round < 5; ++round) {
    spawn([&](int rank) { say("rank " + std::to_string(rank)); }, 2);
  }
  over = true;
  for (auto& thread : busy) thread.join();
}

void two_calls(const Arguments&) {
  spawn([](int rank) { say("first " + std::to_string(rank)); }, 2);
  auto context = spawn([](int rank) { say("second " + std::to_string(rank)); },
                       1, {.join = false});
  if (context.pids().empty()) say("empty in a rank of a later call");
  context.join();
  try {
    spawn([](int) { std::exit(6); }, 1);
  } catch (const SpawnError& error) {
    print_error(error);
  }
  spawn([](int rank) { say("fourth " + std::to_string(rank)); }, 2);
  say("end");
}

void other_children(const Arguments&) {
  pid_t child = -1;
  if (!is_spawned()) {
    child = ::fork();
    if (child == 0) ::_exit(7);
  }
  spawn([](int) {}, 2);
  int status = 0;
  say(::waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7
          ? "the other child is mine"
          : "stolen");
}

void ignored_children(const Arguments&) {
  ::signal(SIGCHLD, SIG_IGN);
  spawn([](int) {}, 2);
  say("success");
  spawn([](int) { std::exit(3); }, 1);
}

// --- the parent's end -----------------------------------------------------

void interrupted(const Arguments& arguments) {
  if (!is_spawned()) ::setpgid(0, 0);
  const std::string how = arguments.empty() ? "" : arguments[0];
  if (!is_spawned() && how == "handled") ::signal(SIGINT, on_terminate);
  if (is_spawned() && how == "early") {
    say("ready");
    stay();
  }
  spawn(
      [](int) {
        say("ready");
        stay();
      },
      3);
}

const std::map<std::string, void (*)(const Arguments&)> kModes{
    {"environment", environment},
    {"statics", statics},
    {"descriptors", descriptors},
    {"bad-arguments", bad_arguments},
    {"fail", fail},
    {"exit-zero", exit_zero},
    {"crash-at-exit", crash_at_exit},
    {"end-before", end_before},
    {"other-call", other_call},
    {"close-report", close_report},
    {"cannot-execute", cannot_execute},
    {"echo", echo},
    {"echo-first", echo_first},
    {"both-fail", both_fail},
    {"grace", grace},
    {"context", context},
    {"context-error", context_error},
    {"drop", drop},
    {"thread-that-ends", thread_that_ends},
    {"threads", threads},
    {"two-calls", two_calls},
    {"other-children", other_children},
    {"ignored-children", ignored_children},
    {"interrupted", interrupted},
};

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argv + 2, argv + argc);
  try {
    kModes.at(argv[1])(arguments);
  } catch (const std::exception& error) {
    print_error(error);
    return 1;
  }
  return 0;
}
