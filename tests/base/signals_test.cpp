#include "lockstep/base/signals.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <stdexcept>

namespace lockstep::internal {
namespace {

TEST(Signals, NamesOfThoseThatCanBeHandled) {
  EXPECT_EQ(parse_signals("--s", "SIGTERM"), std::set<int>{SIGTERM});
  EXPECT_EQ(parse_signals("--s", "SIGUSR1, SIGINT,SIGXCPU"),
            (std::set<int>{SIGUSR1, SIGINT, SIGXCPU}));
  for (const char* text : {"", "SIGKILL", "SIGSTOP", "SIGSEGV", "SIGCHLD",
                           "TERM", "15", "SIGTERM,", "SIGTERM;SIGINT"}) {
    EXPECT_THROW(parse_signals("--s", text), std::invalid_argument) << text;
  }
}

TEST(Signals, TheEnvironmentNamesThoseThatEndAJob) {
  constexpr const char* kName = "TORCHELASTIC_SIGNALS_TO_HANDLE";
  ::unsetenv(kName);
  EXPECT_EQ(ending_signals(), kEndingSignals);
  ::setenv(kName, "SIGUSR2", 1);
  EXPECT_EQ(ending_signals(), std::set<int>{SIGUSR2});
  ::setenv(kName, "SIGNAL", 1);
  EXPECT_THROW(ending_signals(), std::invalid_argument);
  ::unsetenv(kName);
}

std::atomic<pthread_t> handled_in{};

TEST(Signals, AQuietThreadLeavesThemToTheProgramsThreads) {
  struct sigaction action {};
  action.sa_handler = [](int) { handled_in = pthread_self(); };
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  std::thread quiet = quiet_thread([] { ::kill(::getpid(), SIGUSR1); });
  quiet.join();
  // The signal was sent to the process before the thread ended, so it has been
  // delivered to this thread at the latest when this call returns.
  sigset_t now;
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, nullptr, &now), 0);
  EXPECT_FALSE(sigismember(&now, SIGUSR1));
  EXPECT_EQ(handled_in.load(), pthread_self());
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
}

}  // namespace
}  // namespace lockstep::internal
