// A rank for stop_request_test.cpp: `stop_rank SCENARIO`. It makes steps, on
// rank 1 slower ones, until the ranks agree to stop; then it prints "stopped
// RANK STEP" and returns stop_exit_code().
//
//   train    as it is
//   asked    rank 1 calls request_stop() after some steps
//   handler  the program handles SIGTERM itself
//   child    rank 0 forks a child before it makes steps, and prints the signal
//            that has ended it
//   once     makes one step, and stays
//   alone    without a process group
//   cost     prints what a call takes, in microseconds
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/comm/init.h"
#include "lockstep/comm/stop_request.h"

namespace {

using std::chrono::milliseconds;

volatile sig_atomic_t own_signals = 0;

void handle_own(int /*signal*/) {
  own_signals = own_signals + 1;
  lockstep::request_stop();
}

void say(const char* what, int rank, long number) {
  std::printf("%s %d %ld\n", what, rank, number);
  std::fflush(stdout);
}

void print_cost() {
  using Clock = std::chrono::steady_clock;
  constexpr int kCalls = 20'000;
  const auto begin = Clock::now();
  for (int call = 0; call < kCalls; ++call) lockstep::stop_requested();
  const std::chrono::duration<double, std::micro> passed = Clock::now() - begin;
  std::printf("%.2f us\n", passed.count() / kCalls);
}

pid_t fork_child() {
  const pid_t child = ::fork();
  if (child == 0) {
    while (true) ::pause();
  }
  return child;
}

}  // namespace

int main(int, char** argv) {
  const std::string scenario = argv[1];
  std::optional<lockstep::ProcessGroupGuard> group;
  if (scenario != "alone") {
    group.emplace(lockstep::init_process_group(
        argv[2] != nullptr ? argv[2] : "", {.timeout = milliseconds(40'000)}));
  }
  const int rank = group ? lockstep::get_rank() : 0;
  if (scenario == "handler") ::signal(SIGTERM, handle_own);
  pid_t child = -1;
  lockstep::stop_requested();
  if (scenario == "cost") {
    print_cost();
    return 0;
  }
  if (scenario == "child" && rank == 0) child = fork_child();
  say("ready", rank, ::getpid());
  if (scenario == "once") std::this_thread::sleep_for(milliseconds(60'000));
  long step = 0;
  while (true) {
    ++step;
    std::this_thread::sleep_for(milliseconds(1 + 3 * rank));
    if (scenario == "asked" && rank == 1 && step == 20) {
      lockstep::request_stop();
    }
    if (lockstep::stop_requested()) break;
  }
  say("stopped", rank, step);
  if (scenario == "handler") say("own", rank, own_signals);
  if (child > 0) {
    int status = 0;
    ::kill(child, SIGTERM);
    ::waitpid(child, &status, 0);
    say("child", rank, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
  }
  return lockstep::stop_exit_code();
}
