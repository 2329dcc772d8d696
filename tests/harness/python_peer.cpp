#include "tests/harness/python_peer.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

// Returns "SIGSEGV" or what else a process of the peer crashed by; empty if
// none did. A signal that stops a process (SIGTERM, SIGKILL) is not
// a crash.
std::string crash_of(const ProgramResult& result) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    const auto name = std::string("SIG") + ::sigabbrev_np(signal);
    // `timeout` ends as its child has; torchrun ends with 1 and tells the
    // signal.
    if (result.exit_code == 128 + signal ||
        result.err.find("(" + name + ") received by PID") !=
            std::string::npos) {
      return name;
    }
  }
  return {};
}

// Adds a line to a file beside this program's report (cmake/LockstepTest.cmake
// sets the variable; ranks inherit it).
void record(const std::string& line) {
  std::cerr << line << std::endl;
  const char* output = std::getenv("GTEST_OUTPUT");
  const std::string kind = "xml:";
  if (output == nullptr || !std::string(output).starts_with(kind)) return;
  const auto folder = fs::path(output + kind.size()).parent_path();
  fs::create_directories(folder);
  std::ofstream(folder / "python_crashes.txt", std::ios::app) << line + "\n";
}

ProgramResult run(const PythonPeer& peer, std::chrono::seconds allowed) {
  std::vector<std::string> command{"/usr/bin/timeout", "--kill-after=5",
                                   std::to_string(allowed.count()),
                                   LOCKSTEP_TORCH_PYTHON};
  if (peer.ranks > 0) {
    command.insert(command.end(),
                   {"-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node=" + std::to_string(peer.ranks)});
  }
  command.insert(command.end(), peer.arguments.begin(), peer.arguments.end());
  const char* path = std::getenv("PATH");
  ProgramSetup setup{.environment = peer.environment, .input = peer.input};
  setup.environment.insert(
      setup.environment.end(),
      {std::string("PATH=") + (path != nullptr ? path : "/usr/bin:/bin"),
       "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1",
       "PYTHONFAULTHANDLER=1"});
  return RunningProgram(command, setup)
      .finish(allowed + std::chrono::seconds(6));
}

}  // namespace

std::string run_python_peer(const PythonPeer& peer) {
  const auto deadline = Deadline::after(peer.allowed);
  auto result = run(peer, peer.allowed);
  if (const auto crash = crash_of(result); !crash.empty()) {
    record("the peer itself crashed (" + crash +
           ") and is started again: " + peer.arguments.front());
    const auto left =
        std::chrono::duration_cast<std::chrono::seconds>(deadline.remaining());
    result = run(peer, std::max(left, std::chrono::seconds(1)));
  }
  EXPECT_EQ(result.exit_code, 0) << words_of_peer(result);
  return result.out;
}

std::string words_of_peer(const ProgramResult& result) {
  const auto crash = crash_of(result);
  if (crash.empty()) return result.err;
  return "the peer itself crashed (" + crash + ")\n" + result.err;
}

}  // namespace lockstep::internal::testing
