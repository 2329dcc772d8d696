#include "lockstep/launch/spawn.h"

#include <cxxabi.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/launch/spawn_processes.h"
#include "lockstep/worker/error_file.h"

namespace lockstep {
namespace {

using State = internal::SpawnReport::State;

// Returns what this process was spawned as, if it was.
std::optional<internal::SpawnAssignment> read_assignment() {
  const auto text = internal::get_env(internal::SpawnAssignment::kVariable);
  if (!text) return std::nullopt;
  auto assignment = internal::SpawnAssignment::parse(*text);
  if (!assignment || assignment->parent != getppid()) return std::nullopt;
  return assignment;
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return name ? name.get() : type.name();
}

// Compares the name, because this layer does not link LibTorch. c10's DistError
// and its subclasses are what a rank gets when a peer has ended.
bool is_of_communication(const std::string& type) {
  return type.starts_with("c10::Dist") || type.starts_with("gloo::");
}

// what() of a c10::Error ends with a C++ backtrace, dozens of lines that would
// bury the line that says what went wrong. This layer does not link LibTorch,
// so it cannot call what_without_backtrace(). Instead it cuts the text at the
// line with which LibTorch begins a backtrace (c10/util/Backtrace.cpp,
// Exception.cpp), whatever the type, as the error may have been thrown again as
// another one.
std::string without_backtrace(std::string_view what) {
  return std::string(what.substr(0, what.find("\nException raised from ")));
}

// Ends a process whose peers wait for it. Does not destroy statics, which may
// wait for those peers.
[[noreturn]] void end_failed(const internal::SpawnReport& report, State state,
                             const std::string& text) {
  report.tell(state, text);
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  _exit(EXIT_FAILURE);
}

// The report of this process while fn runs; null before and after.
const internal::SpawnReport* running_report = nullptr;

// An exit handler: fn may have caught the error that a peer's end caused.
void tell_of_echo(int status, void*) noexcept {
  try {
    const std::string echo = internal::noted_echo();
    if (running_report == nullptr || status == 0 || echo.empty()) return;
    running_report->tell(
        State::lost_peers,
        "ended with exit code " + std::to_string(status) + " after " + echo);
  } catch (...) {
    // Out of memory: the exit code is known all the same.
  }
}

[[noreturn]] void run_assigned(const internal::SpawnAssignment& assignment,
                               const internal::SpawnCall& call,
                               const std::function<void(int)>& fn) {
  // Sets this again: the kernel clears it in a program that changes its user or
  // group.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != assignment.parent) _exit(128 + SIGKILL);
  // Without this the process would be named "exe".
  prctl(PR_SET_NAME, program_invocation_short_name);
  const auto report = internal::SpawnReport::inherit(assignment.report_fd,
                                                     assignment.report_inode);
  if (call.file != assignment.call.file || call.line != assignment.call.line) {
    end_failed(report, State::astray,
               "came to " + call.describe() +
                   " instead; each spawned process must make the same spawn() "
                   "calls in the same order");
  }
  report.tell(State::reached);
  running_report = &report;
  ::on_exit(tell_of_echo, nullptr);
  try {
    fn(assignment.rank);
  } catch (const std::exception& error) {
    const std::string type = type_name(typeid(error));
    end_failed(report,
               is_of_communication(type) ? State::lost_peers : State::threw,
               "threw " + type + ": " + without_backtrace(error.what()));
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    end_failed(report, State::threw,
               "threw " + (type != nullptr ? type_name(*type) : "something") +
                   ", which is not a std::exception");
  }
  running_report = nullptr;
  report.tell(State::returned);
  std::exit(EXIT_SUCCESS);
}

}  // namespace

SpawnContext::SpawnContext() = default;
SpawnContext::SpawnContext(std::unique_ptr<internal::SpawnProcesses> processes)
    : processes_(std::move(processes)) {}
SpawnContext::SpawnContext(SpawnContext&& other) noexcept = default;
SpawnContext& SpawnContext::operator=(SpawnContext&& other) noexcept = default;
SpawnContext::~SpawnContext() = default;

std::vector<pid_t> SpawnContext::pids() const {
  return processes_ ? processes_->pids() : std::vector<pid_t>();
}

bool SpawnContext::join(std::optional<std::chrono::milliseconds> timeout) {
  return !processes_ || processes_->join(timeout);
}

SpawnContext spawn(const std::function<void(int)>& fn, int nprocs,
                   const SpawnOptions& options, std::source_location location) {
  if (nprocs < 1) {
    throw std::invalid_argument("spawn: nprocs is " + std::to_string(nprocs) +
                                "; it must be at least 1");
  }
  if (!fn) {
    throw std::invalid_argument(
        "spawn: fn is empty; give a function that takes the rank");
  }
  if (options.grace_period && options.grace_period->count() <= 0) {
    throw std::invalid_argument(
        "spawn: grace_period is " +
        std::to_string(options.grace_period->count()) +
        " ms; give more than 0, or none for SIGTERM at once");
  }
  static std::atomic<int> calls{0};
  static const std::optional<internal::SpawnAssignment> assignment =
      read_assignment();
  const internal::SpawnCall call{++calls, location.file_name(),
                                 location.line()};
  if (assignment) {
    if (call.number < assignment->call.number) return SpawnContext();
    if (call.number == assignment->call.number) {
      run_assigned(*assignment, call, fn);
    }
    throw std::invalid_argument(
        call.describe() + " was called in rank " +
        std::to_string(assignment->rank) + " of " +
        assignment->call.describe() +
        "; spawned processes cannot spawn: start all from the first process");
  }
  SpawnContext context(
      std::make_unique<internal::SpawnProcesses>(call, nprocs, options));
  if (options.join) context.join();
  return context;
}

}  // namespace lockstep
