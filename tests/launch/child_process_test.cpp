// How a child is started, watched, signalled and reaped.
#include "lockstep/launch/process/child_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <thread>

#include "lockstep/launch/agent/worker_environment.h"

namespace lockstep::internal::testing {
namespace {

ChildProcess start_shell(const std::string& script, int stdout_fd = 1,
                         ChildSession session = ChildSession::own) {
  const std::vector<std::string> arguments{"sh", "-c", script};
  const auto environment = current_environment();
  return ChildProcess::start({.what = "starting a shell",
                              .path = "/bin/sh",
                              .arguments = arguments,
                              .environment = environment,
                              .stdout_fd = stdout_fd,
                              .session = session});
}

void await_end(ChildProcess& child) {
  pollfd entry{child.pidfd(), POLLIN, 0};
  ASSERT_EQ(poll(&entry, 1, 60'000), 1) << "the child did not end";
  ASSERT_TRUE(child.reap());
}

// Returns what `script` prints.
std::string output_of(const std::string& script, ChildSession session) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  const FileDescriptor out(ends[0]);
  FileDescriptor in(ends[1]);
  ChildProcess child = start_shell(script, in.get(), session);
  in.reset();
  std::string text;
  char byte = 0;
  while (read(out.get(), &byte, 1) == 1) text += byte;
  await_end(child);
  return text;
}

TEST(ChildProcess, AnExitCodeComesBack) {
  ChildProcess child = start_shell("exit 7");
  EXPECT_FALSE(child.ended());
  await_end(child);
  EXPECT_EQ(child.exit_code(), 7);
  EXPECT_EQ(child.ending_signal(), std::nullopt);
  EXPECT_EQ(child.pidfd(), -1);
}

TEST(ChildProcess, ASignalThatEndsItIsNamed) {
  ChildProcess child = start_shell("exec sleep 600");
  child.signal(SIGTERM);
  await_end(child);
  EXPECT_EQ(child.exit_code(), 128 + SIGTERM);
  EXPECT_EQ(child.ending_signal(), SIGTERM);
}

// A group's signal reaches what the child has started, too; only if both are
// dead does the pipe end.
TEST(ChildProcess, TheDestructorKillsTheGroupOfAChildWithItsOwnSession) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const FileDescriptor out(ends[0]);
  FileDescriptor in(ends[1]);
  pid_t pid = -1;
  char byte = 0;
  {
    const ChildProcess child =
        start_shell("sleep 600 & echo; sleep 600", in.get());
    pid = child.pid();
    in.reset();
    ASSERT_EQ(read(out.get(), &byte, 1), 1);  // the first sleep runs
  }
  EXPECT_EQ(read(out.get(), &byte, 1), 0);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);  // the owner reaps, not the class
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST(ChildProcess, OnlyAnOwnSessionIsLedByTheChild) {
  const std::string session = "cut -d' ' -f6 /proc/self/stat";
  EXPECT_EQ(output_of(session, ChildSession::inherited),
            std::to_string(getsid(0)) + "\n");
  EXPECT_EQ(output_of("test $$ = $(cut -d' ' -f6 /proc/$$/stat) && echo leads",
                      ChildSession::own),
            "leads\n");
}

// Bit 1 << (SIGUSR1 - 1) of the ignored signals in /proc/PID/status.
TEST(ChildProcess, AnIgnoredSignalStaysIgnoredOnlyInTheInheritedSession) {
  const auto before = signal(SIGUSR1, SIG_IGN);
  const std::string ignored = "sed -n 's/^SigIgn:\\t//p' /proc/$$/status";
  const auto of = [&](ChildSession session) {
    return std::stoull(output_of(ignored, session), nullptr, 16) >>
               (SIGUSR1 - 1) &
           1;
  };
  EXPECT_EQ(of(ChildSession::inherited), 1U);
  EXPECT_EQ(of(ChildSession::own), 0U);
  signal(SIGUSR1, before);
}

TEST(ChildProcess, AProgramThatTheKernelRefusesIsAnErrorAndLeavesNoChild) {
  const std::vector<std::string> none;
  try {
    ChildProcess::start({.what = "starting nothing",
                         .path = "/nowhere/program",
                         .arguments = none,
                         .environment = none});
    FAIL() << "no error";
  } catch (const ExecError& error) {
    EXPECT_EQ(error.code().value(), ENOENT);
    EXPECT_THAT(error.what(), ::testing::StartsWith("starting nothing: "));
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(ChildProcess, TheKernelKillsItWhenTheThreadThatStartedItEnds) {
  std::optional<ChildProcess> child;
  std::thread([&] { child.emplace(start_shell("exec sleep 600")); }).join();
  await_end(*child);
  EXPECT_EQ(child->ending_signal(), SIGKILL);
}

TEST(ChildProcess, AForkedFunctionEndsWithItsResult) {
  ChildProcess child =
      ChildProcess::fork("starting a function", [] { return 5; });
  int status = 0;
  ASSERT_EQ(waitpid(child.pid(), &status, 0), child.pid());
  child.set_ended(status);
  EXPECT_TRUE(child.ended());
  EXPECT_EQ(child.exit_code(), 5);
}

// Refuses `call`, as the sandboxes of containers do with calls that they do not
// know. Cannot be taken back. Ends this process if that is not possible.
void refuse_call(int call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    _exit(99);  // the caller is a forked function
  }
}

// Returns how `start` ended when it was sent SIGTERM in a process to which
// `call` is refused.
int signal_that_ends(const std::function<ChildProcess()>& start, int call) {
  ChildProcess sandbox = ChildProcess::fork("starting a sandbox", [&] {
    refuse_call(call);
    ChildProcess child = start();
    child.signal(SIGTERM);
    while (!child.reap()) std::this_thread::yield();
    return child.ending_signal().value_or(0);
  });
  int status = 0;
  EXPECT_EQ(waitpid(sandbox.pid(), &status, 0), sandbox.pid());
  sandbox.set_ended(status);
  return sandbox.exit_code();
}

TEST(ChildProcess, ASandboxWithoutSignalsByPidfdSignalsByNumber) {
  const auto sleep = [] { return start_shell("exec sleep 600"); };
  EXPECT_EQ(signal_that_ends(sleep, SYS_pidfd_send_signal), SIGTERM);
}

TEST(ChildProcess, ASandboxWithoutPidfdsReapsByNumber) {
  const auto function = [] {
    return ChildProcess::fork("starting a function", [] {
      while (true) ::pause();
      return 0;
    });
  };
  EXPECT_EQ(signal_that_ends(function, SYS_pidfd_open), SIGTERM);
}

TEST(ChildProcess, AChildThatOtherCodeReapedEndsWithoutAStatus) {
  ChildProcess child = start_shell("exit 7");
  ASSERT_EQ(waitpid(child.pid(), nullptr, 0), child.pid());
  EXPECT_TRUE(child.reap());
  EXPECT_EQ(child.wait_status(), std::nullopt);
}

}  // namespace
}  // namespace lockstep::internal::testing
