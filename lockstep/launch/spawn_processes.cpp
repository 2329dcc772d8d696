#include "lockstep/launch/spawn_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "lockstep/base/signals.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr const char* kThisProgram = "/proc/self/exe";

// From SIGTERM to SIGKILL if no grace period is given; the launcher's value.
constexpr milliseconds kShutdownTimeout{500};
// How long the cause of an echo may take to become known.
constexpr milliseconds kCauseTimeout{1000};
// How long a process may take to end after SIGKILL; only one that is stuck in
// the kernel takes long.
constexpr milliseconds kKillTimeout{5000};
// How often the end of a process without a pidfd is asked for.
constexpr milliseconds kAskAgain{20};
// A timeout that is long enough to mean none, but short enough to be added to
// any clock.
constexpr milliseconds kLongestTimeout{std::chrono::hours(24 * 3650)};

FileDescriptor open_null() {
  FileDescriptor fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!fd) throw_errno("opening /dev/null for spawned processes");
  return above_standard_streams(std::move(fd));
}

std::string path_of_this_program() {
  char path[PATH_MAX];
  const ssize_t size = readlink(kThisProgram, path, sizeof(path));
  return size < 0 ? kThisProgram : std::string(path, static_cast<size_t>(size));
}

// argv as the kernel keeps it: each argument ends with a zero byte.
std::vector<std::string> arguments_of_this_program() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string text; std::getline(file, text, '\0');) {
    arguments.push_back(text);
  }
  if (arguments.empty()) {
    throw std::runtime_error(
        "spawn: the arguments of this program cannot be read from "
        "/proc/self/cmdline; mount /proc");
  }
  return arguments;
}

std::vector<std::string> environment_of(
    const SpawnAssignment& assignment, int nprocs, const StorePort& port,
    int master_listen_fd, const std::vector<std::string>& inherited) {
  WorkerIdentity identity;
  identity.local_rank = assignment.rank;
  identity.local_world_size = nprocs;
  identity.master_addr = port.address();
  identity.master_port = port.port();
  identity.run_id = "spawn-" + std::to_string(assignment.parent) + "-" +
                    std::to_string(assignment.call.number);
  identity.master_listen_fd = master_listen_fd;
  auto entries = worker_environment(identity, inherited);
  const std::string assigned = std::string(SpawnAssignment::kVariable) + "=";
  std::erase_if(entries, [&](const std::string& entry) {
    // The error file of a launcher around this process is not for the spawned
    // processes.
    return entry == "TORCHELASTIC_ERROR_FILE=" || entry.starts_with(assigned);
  });
  entries.push_back(assigned + assignment.to_string());
  return entries;
}

bool tells_text(SpawnReport::State state) {
  using State = SpawnReport::State;
  return state == State::threw || state == State::lost_peers ||
         state == State::astray;
}

std::string ended_how(const ChildProcess& process) {
  const auto status = process.wait_status();
  if (!status) {
    return "ended, and other code of this process took its exit code (it "
           "ignores SIGCHLD, or waits for any child)";
  }
  if (WIFSIGNALED(*status)) {
    return "was killed by " + signal_name(WTERMSIG(*status));
  }
  return "ended with exit code " + std::to_string(WEXITSTATUS(*status));
}

}  // namespace

std::string SpawnCall::describe() const {
  return "spawn() at " + file.substr(file.rfind('/') + 1) + ":" +
         std::to_string(line);
}

std::string SpawnAssignment::to_string() const {
  std::ostringstream text;
  text << parent << ' ' << rank << ' ' << report_fd << ' ' << report_inode
       << ' ' << call.number << ' ' << call.line << ' ' << call.file;
  return text.str();
}

std::optional<SpawnAssignment> SpawnAssignment::parse(const std::string& text) {
  SpawnAssignment read;
  std::istringstream stream(text);
  stream >> read.parent >> read.rank >> read.report_fd >> read.report_inode >>
      read.call.number >> read.call.line >> std::ws;
  std::getline(stream, read.call.file);
  if (!stream) return std::nullopt;
  return read;
}

SpawnProcesses::SpawnProcesses(const SpawnCall& call, int nprocs,
                               const SpawnOptions& options)
    : call_(call),
      nprocs_(nprocs),
      options_(options),
      port_(StorePort::hold("127.0.0.1", 0)) {
  // The keeper starts with all signals blocked: so a user's handler runs in the
  // threads where it ran before, and never in a child that shares this memory
  // until it executes.
  sigset_t original;
  pthread_sigmask(SIG_SETMASK, nullptr, &original);
  keeper_ = quiet_thread(&SpawnProcesses::keep, this, std::cref(original));
  started_.wait();
  if (start_error_) {
    keeper_.join();
    std::rethrow_exception(start_error_);
  }
}

SpawnProcesses::~SpawnProcesses() {
  kill_all();
  released_.count_down();
  keeper_.join();
}

void SpawnProcesses::keep(const sigset_t& signal_mask) {
  try {
    start_all(signal_mask);
  } catch (...) {
    kill_all();
    start_error_ = std::current_exception();
  }
  // `signal_mask` belongs to the constructor, which goes on from here, so it is
  // not used after this line.
  started_.count_down();
  if (!start_error_) released_.wait();
}

void SpawnProcesses::start_all(const sigset_t& signal_mask) {
  const auto arguments = arguments_of_this_program();
  const auto inherited = current_environment();
  const FileDescriptor null = open_null();
  const FileDescriptor listen = above_standard_streams(
      FileDescriptor(::fcntl(port_.fd(), F_DUPFD_CLOEXEC, 3)));
  if (!listen) throw_errno("duplicating the store's port");
  const std::string program = path_of_this_program();
  ranks_.reserve(static_cast<size_t>(nprocs_));
  for (int rank = 0; rank < nprocs_; ++rank) {
    auto report = SpawnReport::create();
    const int listen_fd = rank == 0 ? listen.get() : -1;
    const SpawnAssignment assignment{.parent = getpid(),
                                     .rank = rank,
                                     .report_fd = report.fd(),
                                     .report_inode = report.inode(),
                                     .call = call_};
    const auto environment =
        environment_of(assignment, nprocs_, port_, listen_fd, inherited);
    auto process = ChildProcess::start(
        {.what = "spawn: executing this program (" + program +
                 ") again as rank " + std::to_string(rank),
         .path = kThisProgram,
         .arguments = arguments,
         .environment = environment,
         .stdin_fd = null.get(),
         .inherited_fds = {report.fd(), listen_fd},
         .session = ChildSession::inherited,
         .surroundings = {.signal_mask = signal_mask}});
    ranks_.push_back({rank, std::move(process), std::move(report)});
  }
}

std::vector<pid_t> SpawnProcesses::pids() const {
  std::vector<pid_t> pids;
  for (const auto& spawned : ranks_) pids.push_back(spawned.process.pid());
  return pids;
}

void SpawnProcesses::reap_ended() {
  for (auto& spawned : ranks_) spawned.process.reap();
}

size_t SpawnProcesses::running() const {
  return static_cast<size_t>(std::count_if(
      ranks_.begin(), ranks_.end(),
      [](const auto& spawned) { return !spawned.process.ended(); }));
}

void SpawnProcesses::signal_all(int signal) const {
  for (const auto& spawned : ranks_) spawned.process.signal(signal);
}

void SpawnProcesses::kill_all() {
  signal_all(SIGKILL);
  wait(Deadline::after(kKillTimeout), false);
  ranks_.clear();
}

void SpawnProcesses::wait(const std::optional<Deadline>& deadline, bool any) {
  const size_t at_first = running();
  while (true) {
    reap_ended();
    const size_t left = running();
    if (left == 0 || (any && left < at_first)) return;
    if (deadline && deadline->expired()) return;
    int64_t allowed = deadline ? deadline->remaining().count() : INT_MAX;
    std::vector<pollfd> entries;
    for (const auto& [rank, process, report] : ranks_) {
      if (process.ended()) continue;
      entries.push_back({process.pidfd(), POLLIN, 0});
      // poll() ignores an entry without a descriptor.
      if (process.pidfd() < 0) allowed = std::min(allowed, kAskAgain.count());
    }
    // EINTR is not an error here: a handler of the user has run, and the loop
    // waits on.
    ::poll(entries.data(), entries.size(),
           static_cast<int>(std::min<int64_t>(allowed, INT_MAX)));
  }
}

NamedRanks SpawnProcesses::named_ranks() const {
  NamedRanks named;
  for (const auto& [rank, process, report] : ranks_) {
    if (report.told().state != SpawnReport::State::lost_peers) continue;
    const std::string text = report.text();
    for (const int one : ranks_named_in(text)) {
      named.emplace(one, "rank " + std::to_string(rank) + " " +
                             text.substr(0, text.find('\n')));
    }
  }
  return named;
}

std::optional<WorkerFailure> SpawnProcesses::first_failure(
    bool or_named) const {
  using State = SpawnReport::State;
  NamedRanks named = named_ranks();
  std::optional<WorkerFailure> first;
  for (const auto& [rank, process, report] : ranks_) {
    const auto [state, when] = report.told();
    const auto status = process.wait_status();
    const bool is_named = state != State::lost_peers && named.contains(rank);
    const bool failed_in_silence =
        process.ended() && (state == State::starting ||
                            (status ? *status != 0 : state != State::returned));
    if (!tells_text(state) && !failed_in_silence &&
        !(is_named && (or_named || process.ended()))) {
      continue;
    }
    WorkerFailure failure;
    failure.rank = rank;
    if (is_named) failure.named_by = named[rank];
    if (tells_text(state)) {
      failure.error.kind =
          state == State::lost_peers ? FailureKind::echo : FailureKind::cause;
    } else if (status && WIFSIGNALED(*status)) {
      // SIGPIPE comes from a write to a peer that has ended.
      failure.error.kind =
          WTERMSIG(*status) == SIGPIPE ? FailureKind::echo : FailureKind::cause;
    }
    // Processes that a failure takes along may say so sooner than its cause
    // does: when an exception leaves fn, fn's variables are destroyed, and
    // connections closed, before the exception can be reported. So one that a
    // signal killed, whose time stays 0, comes before all that threw.
    if (tells_text(state) || failure.error.kind == FailureKind::echo) {
      failure.ended = std::chrono::system_clock::time_point(when);
    }
    if (!first || comes_before(failure, *first)) first = std::move(failure);
  }
  return first;
}

std::optional<WorkerFailure> SpawnProcesses::await_cause() {
  const auto deadline = Deadline::after(kCauseTimeout);
  while (true) {
    const bool last = running() == 0 || deadline.expired();
    auto failure = first_failure(/*or_named=*/last);
    if (last || !failure || !failure->named_by.empty() ||
        failure->error.kind != FailureKind::echo) {
      return failure;
    }
    wait(deadline, true);
  }
}

void SpawnProcesses::stop() {
  const auto wait_for = [this](milliseconds time) {
    wait(Deadline::after(time), false);
  };
  if (options_.grace_period) wait_for(*options_.grace_period);
  signal_all(SIGTERM);
  wait_for(options_.grace_period.value_or(kShutdownTimeout));
  signal_all(SIGKILL);
  wait_for(kKillTimeout);
}

SpawnError SpawnProcesses::error_of(const SpawnedRank& spawned,
                                    bool was_running) const {
  using State = SpawnReport::State;
  const auto& [rank, process, report] = spawned;
  const State state = report.told().state;
  const auto status = process.wait_status();
  std::string text = call_.describe() + ": rank " + std::to_string(rank) +
                     " of " + std::to_string(nprocs_) + " (pid " +
                     std::to_string(process.pid()) + ") ";
  int exit_code = status ? exit_code_of(*status) : -1;
  std::optional<int> signal;
  if (tells_text(state)) {
    text += report.text();
    // The process may have been stopped before it exited.
    if (!status || !WIFEXITED(*status)) exit_code = 1;
  } else {
    text += was_running ? "left its group, and was stopped while it was ending"
                        : ended_how(process);
    if (status && WIFSIGNALED(*status)) signal = WTERMSIG(*status);
    if (state == State::starting) {
      text +=
          " without reaching this call; each spawned process runs main() "
          "again, and the code before the call must lead it there";
    } else if (state == State::returned) {
      text += exit_code == 0
                  ? " after fn had returned"
                  : " after fn had returned, while its statics were destroyed";
    }
    const NamedRanks named = named_ranks();
    if (const auto words = named.find(rank);
        words != named.end() && (was_running || !signal)) {
      text += "; others needed it: " + words->second;
    }
  }
  return SpawnError(text, rank, process.pid(), exit_code, signal);
}

bool SpawnProcesses::join(std::optional<milliseconds> timeout) {
  std::optional<Deadline> deadline;
  if (timeout) deadline = Deadline::after(std::min(*timeout, kLongestTimeout));
  while (true) {
    if (error_) throw SpawnError(*error_);
    reap_ended();
    if (const auto failure = await_cause()) {
      const SpawnedRank& spawned = ranks_[failure->rank];
      const bool was_running =
          !spawned.process.ended() && !tells_text(spawned.report.told().state);
      stop();
      error_ = error_of(spawned, was_running);
      continue;
    }
    if (running() == 0) return true;
    if (deadline && deadline->expired()) return false;
    wait(deadline, true);
  }
}

}  // namespace lockstep::internal
