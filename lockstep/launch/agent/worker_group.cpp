#include "lockstep/launch/agent/worker_group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ranges>
#include <string_view>
#include <utility>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/number_list.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/watch/hang_finder.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

FileDescriptor open_null(int flags) {
  FileDescriptor fd(::open("/dev/null", flags | O_CLOEXEC));
  if (!fd) throw_errno("opening /dev/null");
  return fd;
}

// A worker of an earlier attempt may have left anything under this name.
FileDescriptor make_log_file(const std::filesystem::path& path) {
  FileDescriptor fd = make_own_file(path, O_APPEND);
  if (!fd) throw_errno("opening " + path.string());
  return fd;
}

// Returns the descriptor to which one output stream of one worker goes by the
// options; an empty one if it is the launcher's own.
FileDescriptor route_stream(const OutputOptions& options,
                            const std::string& role, int local_rank, int rank,
                            Streams stream, const RunDirectory& run_directory,
                            const std::filesystem::path& directory,
                            OutputMux& mux,
                            std::shared_ptr<std::string> last_line) {
  const bool shown = !options.local_ranks_filter ||
                     options.local_ranks_filter->count(local_rank) > 0;
  const bool redirected = includes(options.redirects.of(local_rank), stream);
  const bool teed = includes(options.tee.of(local_rank), stream) ||
                    (options.prefix_lines && !redirected);
  const bool to_file =
      run_directory.keeps_logs() &&
      (redirected || includes(options.tee.of(local_rank), stream));

  const auto path =
      directory / (stream == Streams::out ? "stdout.log" : "stderr.log");
  FileDescriptor file;
  if (to_file) {
    file = make_log_file(path);
  }
  if (teed && shown) {
    return mux.add_stream(stream == Streams::out ? OutputMux::Console::out
                                                 : OutputMux::Console::err,
                          line_prefix(options, role, local_rank, rank),
                          {std::move(file), path.string()},
                          std::move(last_line));
  }
  if (file) return file;
  return shown ? FileDescriptor() : open_null(O_WRONLY);
}

void open_filtered_logs(const OutputOptions& options,
                        const RunDirectory& directory, int round,
                        OutputMux& mux) {
  if (!directory.keeps_logs()) return;
  const auto folder = directory.attempt_directory(round);
  const auto open = [&](OutputMux::Console console, const char* name,
                        const std::vector<std::string>& filters) {
    if (filters.empty()) return;
    std::filesystem::create_directories(folder);
    const auto path = folder / name;
    mux.duplicate_lines(console, filters, {make_log_file(path), path});
  };
  open(OutputMux::Console::out, "filtered_stdout.log", options.stdout_filters);
  open(OutputMux::Console::err, "filtered_stderr.log", options.stderr_filters);
}

// Says that a worker that SIGKILL has ended may be one of the processes that
// the kernel has `killed` because memory had run out.
void name_oom_killer(WorkerFailure& failure, int64_t killed) {
  if (killed <= 0) return;
  failure.error.kind = FailureKind::cause;
  failure.error.message =
      "out of memory: since the workers were started, the kernel's OOM killer "
      "has ended " +
      std::to_string(killed) + (killed == 1 ? " process" : " processes") +
      " of this control group";
  if (const auto limit = memory_limit()) {
    failure.error.message +=
        ", which may use " + std::to_string(limit->limit >> 20) + " MiB";
  }
}

// Returns a standby process that has become a worker, if there is one. Without
// it the worker is started as it is the first time.
std::optional<StandbyPool::Taken> take_standby(StandbyPool& standby,
                                               const ChildStart& start) {
  try {
    return standby.take(start);
  } catch (const std::system_error&) {
    return std::nullopt;  // no memory or descriptor to tell it
  }
}

}  // namespace

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options,
                         const RoundPlan& plan, int master_listen_fd,
                         const std::string& store_socket,
                         const RunDirectory& directory,
                         const Surroundings& surroundings, OutputMux& mux,
                         StandbyPool* standby)
    : first_rank_(plan.place.first_rank),
      standby_(standby),
      oom_kills_before_(oom_kills()) {
  const std::vector<std::string> inherited = current_environment();
  const FileDescriptor no_input = open_null(O_RDONLY);
  open_filtered_logs(options.output, directory, plan.round, mux);
  workers_.reserve(static_cast<size_t>(options.nproc_per_node));
  for (int rank = 0; rank < options.nproc_per_node; ++rank) {
    const auto path = directory.worker_directory(plan.round, rank);
    const auto error_file = path / "error.json";
    Program program = options.program;
    program.expand_local_rank(rank);

    WorkerIdentity identity;
    identity.local_rank = rank;
    identity.place = plan.place;
    identity.master_addr = plan.master_addr;
    identity.master_port = plan.master_port;
    identity.restart_count = plan.restarts_used;
    identity.local_world_size = options.nproc_per_node;
    identity.role = options.role;
    identity.max_restarts = options.max_restarts;
    identity.run_id = options.run_id;
    identity.agent_socket = options.agent_socket;
    identity.store_socket = store_socket;
    identity.worker_store = options.worker_store;
    identity.signals_to_handle = options.signals_to_handle;
    const auto at = static_cast<size_t>(rank);
    if (!options.only_gpus.empty()) identity.only_gpu = options.only_gpus[at];
    if (!options.omp_threads.empty()) {
      identity.omp_threads = options.omp_threads[at];
    }
    identity.error_file = error_file;
    if (options.tells_progress) {
      identity.progress_file = path / HangFinder::kProgressFile;
    }
    identity.flight_directory = directory.attempt_directory(plan.round);
    identity.master_listen_fd = rank == 0 ? master_listen_fd : -1;
    const auto environment = worker_environment(identity, inherited);

    std::vector<std::shared_ptr<std::string>> last_lines;
    const auto route = [&](Streams stream) {
      last_lines.push_back(std::make_shared<std::string>());
      return route_stream(options.output, options.role, rank,
                          first_rank_ + rank, stream, directory, path, mux,
                          last_lines.back());
    };
    const FileDescriptor out = route(Streams::out);
    const FileDescriptor err = route(Streams::err);
    const ChildStart start{
        .what = "starting a worker process",
        .path = program.path,
        .arguments = program.arguments,
        .environment = environment,
        .stdin_fd = rank == 0 ? STDIN_FILENO : no_input.get(),
        .stdout_fd = out ? out.get() : STDOUT_FILENO,
        .stderr_fd = err ? err.get() : STDERR_FILENO,
        .inherited_fds = {identity.master_listen_fd, -1},
        .cpus = options.cpus.empty() ? std::set<int>() : options.cpus[at],
        .surroundings = surroundings};
    start_worker(start, error_file);
    workers_.back().last_lines = std::move(last_lines);
  }
  if (standby_ != nullptr) standby_->end_kept();
}

void WorkerGroup::start_worker(const ChildStart& start,
                               std::filesystem::path error_file) {
  if (standby_ == nullptr) {
    workers_.push_back({start_program(start), std::move(error_file)});
    return;
  }
  const auto add = [&](ChildProcess process, FileDescriptor socket) {
    workers_.push_back(
        {.process = std::move(process),
         .error_file = std::move(error_file),
         .environment = start.environment,
         .streams = stream_marks(start.stdout_fd, start.stderr_fd),
         .socket = std::move(socket)});
  };
  if (auto taken = take_standby(*standby_, start)) {
    ++stood_by_;
    return add(std::move(taken->process), std::move(taken->socket));
  }
  auto [own, theirs] = standby_sockets(start.what);
  std::vector<std::string> environment = start.environment;
  environment.push_back(std::string(kStandbySocketVariable) + "=" +
                        standby_mark(theirs));
  ChildStart with_socket{
      .what = start.what,
      .path = start.path,
      .arguments = start.arguments,
      .environment = environment,
      .stdin_fd = start.stdin_fd,
      .stdout_fd = start.stdout_fd,
      .stderr_fd = start.stderr_fd,
      .inherited_fds = {start.inherited_fds[0], theirs.get()},
      .cpus = start.cpus,
      .surroundings = start.surroundings};
  add(start_program(with_socket), std::move(own));
}

void WorkerGroup::let_leave() {
  may_leave_ = true;
  for (Worker& worker : workers_) {
    if (worker.stage != Worker::Stage::has_met) continue;
    worker.stage = Worker::Stage::left;
    send_leave(worker.socket);
  }
}

void WorkerGroup::call_back() {
  if (std::ranges::any_of(workers_, [](const Worker& worker) {
        return worker.stage == Worker::Stage::left;
      })) {
    return;
  }
  for (Worker& worker : workers_) {
    if (worker.process.ended() || worker.hung) continue;
    if (worker.stage == Worker::Stage::meets ||
        worker.stage == Worker::Stage::has_met) {
      worker.stage = Worker::Stage::called_back;
      send_back(worker.socket, worker.streams);
    }
  }
}

void WorkerGroup::add_poll_entries(std::vector<pollfd>& entries) const {
  for (const Worker& worker : workers_) {
    if (worker.socket) entries.push_back({worker.socket.get(), POLLIN, 0});
  }
}

void WorkerGroup::handle_poll_entries(std::span<const pollfd> entries) {
  for (Worker& worker : workers_) {
    if (worker.socket && has_come(entries, worker.socket.get())) {
      while (hear(worker)) {
      }
    }
  }
}

bool WorkerGroup::hear(Worker& worker) {
  using Stage = Worker::Stage;
  std::array<char, 64> bytes;
  const ssize_t count =
      ::recv(worker.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (count < 0 && errno == EINTR) return true;
  if (count < 0 && errno == EAGAIN) return false;
  if (count <= 0) {
    worker.socket.reset();
    return false;
  }
  const std::string_view words(bytes.data(), static_cast<size_t>(count));
  if (words == kStandbyMeets) {
    if (worker.stage == Stage::before_group) worker.stage = Stage::meets;
  } else if (words == kStandbyMet && worker.stage != Stage::called_back) {
    // While the group is being stopped it may go: SIGTERM is on its way.
    const bool may_leave = may_leave_ || worker.stage == Stage::left;
    worker.stage = may_leave ? Stage::left : Stage::has_met;
    if (may_leave) send_leave(worker.socket);
  } else if (words == kStandbyWaits && worker.stage == Stage::called_back &&
             !worker.process.ended() && !killed_) {
    worker.stage = Stage::kept;
    standby_->keep(std::move(worker.process), std::move(worker.socket),
                   worker.environment);
    return false;
  }
  return true;
}

std::set<pid_t> WorkerGroup::pids() const {
  std::set<pid_t> all;
  for (const Worker& worker : workers_) {
    if (!worker.process.ended()) all.insert(worker.process.pid());
  }
  return all;
}

std::set<pid_t> WorkerGroup::stopped() const {
  std::set<pid_t> all;
  for (const Worker& worker : workers_) {
    if (worker.was_stopped) all.insert(worker.process.pid());
  }
  return all;
}

void WorkerGroup::signal_process_groups(int signal) const {
  for (const auto& worker : workers_) {
    if (signal == SIGTERM && (worker.hung || worker.is_spared ||
                              worker.stage == Worker::Stage::called_back)) {
      continue;
    }
    worker.process.signal_group(signal);
  }
}

void WorkerGroup::kill_workers() {
  killed_ = true;
  for (auto& worker : workers_) {
    worker.is_spared = false;
    worker.process.signal(SIGKILL);
  }
}

size_t WorkerGroup::running() const {
  return static_cast<size_t>(std::count_if(
      workers_.begin(), workers_.end(),
      [](const auto& worker) { return !worker.process.ended(); }));
}

std::vector<WorkerStatus> WorkerGroup::statuses() const {
  std::vector<WorkerStatus> all;
  for (size_t at = 0; at < workers_.size(); ++at) {
    const ChildProcess& process = workers_[at].process;
    if (workers_[at].stage == Worker::Stage::kept) continue;
    WorkerStatus status;
    status.local_rank = static_cast<int>(at);
    status.rank = first_rank_ + status.local_rank;
    status.pid = process.pid();
    if (process.ended()) {
      status.exit_code = process.exit_code();
      status.signal = process.ending_signal();
    }
    all.push_back(status);
  }
  return all;
}

std::string WorkerGroup::name_running() const {
  std::vector<int> ranks;
  for (size_t at = 0; at < workers_.size(); ++at) {
    if (!workers_[at].process.ended()) {
      ranks.push_back(first_rank_ + static_cast<int>(at));
    }
  }
  return name_numbers("rank", ranks);
}

void WorkerGroup::set_ended(pid_t pid, int wait_status) {
  for (auto& worker : workers_) {
    ChildProcess& process = worker.process;
    if (process.pid() != pid || process.ended()) continue;
    process.set_ended(wait_status);
    worker.was_stopped = settled_ && !worker.is_spared;
    if (!settled_ && process.exit_code() != 0) failed_ = true;
  }
}

NamedRanks WorkerGroup::named_ranks() const {
  NamedRanks named;
  for (size_t at = 0; at < workers_.size(); ++at) {
    const auto record = read_error_file(workers_[at].error_file);
    for (const int rank : record.named) {
      named.emplace(
          rank, "rank " + std::to_string(first_rank_ + static_cast<int>(at)) +
                    ": " + record.message.substr(0, record.message.find('\n')));
    }
  }
  return named;
}

void WorkerGroup::look_for_causes(const NamedRanks& named) {
  named_elsewhere_ = named;
  for (size_t at = 0; at < workers_.size(); ++at) {
    const auto record = read_error_file(workers_[at].error_file);
    const int rank = first_rank_ + static_cast<int>(at);
    if (record.kind == FailureKind::cause
            ? !workers_[at].process.ended()
            : record.kind != FailureKind::echo && named.contains(rank)) {
      failed_ = true;
    }
  }
}

bool WorkerGroup::spare_named() {
  const NamedRanks named = named_ranks();
  bool any = false;
  for (size_t at = 0; at < workers_.size(); ++at) {
    Worker& worker = workers_[at];
    worker.is_spared =
        !worker.process.ended() && !worker.hung &&
        named.contains(first_rank_ + static_cast<int>(at)) &&
        read_error_file(worker.error_file).kind != FailureKind::echo;
    any = any || worker.is_spared;
  }
  return any;
}

void WorkerGroup::end_spared() {
  for (Worker& worker : workers_) {
    if (!std::exchange(worker.is_spared, false)) continue;
    worker.process.signal_group(SIGTERM);
    worker.process.signal_group(SIGCONT);
  }
}

void WorkerGroup::end_hung(std::vector<HungWorker> hung) {
  failed_ = true;
  hung_at_ = std::chrono::system_clock::now();
  for (HungWorker& one : hung) {
    Worker& worker = workers_[static_cast<size_t>(one.local_rank)];
    worker.hung = std::move(one);
    worker.process.signal_main_thread(SIGABRT);
  }
}

std::vector<WorkerFailure> WorkerGroup::failures() const {
  std::vector<WorkerFailure> all;
  NamedRanks named = named_ranks();
  named.insert(named_elsewhere_.begin(), named_elsewhere_.end());
  for (size_t at = 0; at < workers_.size(); ++at) {
    const Worker& worker = workers_[at];
    const ChildProcess& process = worker.process;
    if (worker.stage == Worker::Stage::kept) continue;
    WorkerFailure failure;
    failure.rank = first_rank_ + static_cast<int>(at);
    if (process.ended()) {
      failure.exit_code = process.exit_code();
      failure.signal = process.ending_signal();
      failure.lifetime = process.lifetime();
      failure.ended = process.ended_at();
    } else if (worker.hung && killed_) {
      failure.signal = SIGKILL;  // the kernel does not let it go
      failure.ended = hung_at_;
    } else {
      continue;
    }
    if (worker.hung) {
      failure.hung = true;
      failure.error = {worker.hung->waits_for_others ? FailureKind::echo
                                                     : FailureKind::cause,
                       worker.hung->message, hung_at_};
      failure.stack = worker.hung->stack;
      // It may handle SIGABRT.
      if (failure.exit_code == 0) {
        failure.exit_code = 128 + failure.signal.value_or(SIGABRT);
      }
    } else {
      failure.error = read_error_file(worker.error_file);
      failure.was_stopped = worker.was_stopped;
      if (failure.signal == SIGKILL && !worker.was_stopped) {
        name_oom_killer(failure, oom_kills() - oom_kills_before_);
      }
      if (const auto found = named.find(failure.rank);
          found != named.end() && failure.error.kind == FailureKind::unknown) {
        failure.named_by = found->second;
        failure.error.kind = FailureKind::cause;
      } else if (failure.exit_code == 0 ||
                 (failure.was_stopped && failure.error.message.empty())) {
        continue;
      }
    }
    if (failure.stack.empty()) {
      failure.stack = read_crash_stack(worker.error_file);
    }
    for (const auto& line : std::views::reverse(worker.last_lines)) {
      if (failure.last_line.empty()) failure.last_line = *line;
    }
    failure.local_rank = static_cast<int>(at);
    failure.pid = process.pid();
    all.push_back(std::move(failure));
  }
  std::ranges::sort(all, comes_before);
  return all;
}

}  // namespace lockstep::internal
