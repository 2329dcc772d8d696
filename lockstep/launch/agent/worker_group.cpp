#include "lockstep/launch/agent/worker_group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <ranges>
#include <string_view>
#include <utility>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/descriptor_mark.h"
#include "lockstep/base/number_list.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/watch/hang_finder.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/healing_place.h"
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

// Returns the memory of a worker's place (worker/healing_place.h).
FileDescriptor place_memory() {
  FileDescriptor file(::memfd_create("lockstep-place", MFD_CLOEXEC));
  if (!file) throw_errno("memory for the place of a worker");
  return above_standard_streams(std::move(file));
}

}  // namespace

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options,
                         const RoundPlan& plan, int generation,
                         std::vector<int> places, int master_listen_fd,
                         const std::string& store_socket,
                         const RunDirectory& directory,
                         const Surroundings& surroundings, OutputMux& mux,
                         StandbyPool* standby)
    : options_(options),
      plan_(plan),
      master_listen_fd_(master_listen_fd),
      store_socket_(store_socket),
      directory_(directory),
      surroundings_(surroundings),
      mux_(mux),
      standby_(standby),
      place_(plan.place),
      places_(std::move(places)),
      no_input_(open_null(O_RDONLY)),
      oom_kills_before_(oom_kills()) {
  open_filtered_logs(options.output, directory, plan.round, mux);
  number_ranks();
  workers_.reserve(static_cast<size_t>(options.nproc_per_node));
  for (int rank = 0; rank < options.nproc_per_node; ++rank) {
    memory_.push_back(options.heals ? place_memory() : FileDescriptor());
    workers_.push_back(
        std::move(*start_worker(rank, generation, /*only_standby=*/false)));
    workers_.back().heals = workers_.back().joins = generation > 0;
  }
  if (standby_ != nullptr) standby_->end_kept();
}

std::optional<WorkerGroup::Worker> WorkerGroup::start_worker(
    int local_rank, int generation, bool only_standby) {
  const auto at = static_cast<size_t>(local_rank);
  const int rank = rank_in_place(place_of(at));
  const auto path =
      directory_.worker_directory(plan_.round, local_rank, generation);
  Program program = options_.program;
  program.expand_local_rank(local_rank);

  WorkerIdentity identity;
  identity.local_rank = local_rank;
  identity.place = place_;
  identity.rank = rank;
  identity.master_addr = plan_.master_addr;
  identity.master_port = plan_.master_port;
  identity.restart_count = plan_.restarts_used;
  identity.local_world_size =
      rank_in_place(place_of(0) + options_.nproc_per_node) - place_.first_rank;
  identity.role = options_.role;
  identity.max_restarts = options_.max_restarts;
  identity.run_id = options_.run_id;
  identity.agent_socket = options_.agent_socket;
  identity.store_socket = store_socket_;
  identity.worker_store = options_.worker_store;
  identity.signals_to_handle = options_.signals_to_handle;
  if (!options_.only_gpus.empty()) identity.only_gpu = options_.only_gpus[at];
  if (!options_.omp_threads.empty()) {
    identity.omp_threads = options_.omp_threads[at];
  }
  identity.error_file = path / "error.json";
  if (options_.tells_progress) {
    identity.progress_file = progress_file(local_rank);
  }
  identity.flight_directory = directory_.attempt_directory(plan_.round);
  identity.master_listen_fd = local_rank == 0 ? master_listen_fd_ : -1;
  identity.heals = options_.heals;
  identity.generation = generation;
  if (memory_[at]) identity.place_memory = descriptor_mark(memory_[at].get());
  const auto environment = worker_environment(identity, current_environment());

  std::vector<std::shared_ptr<std::string>> last_lines;
  const auto route = [&](Streams stream) {
    last_lines.push_back(std::make_shared<std::string>());
    return route_stream(options_.output, options_.role, local_rank, rank,
                        stream, directory_, path, mux_, last_lines.back());
  };
  const FileDescriptor out = route(Streams::out);
  const FileDescriptor err = route(Streams::err);
  auto worker = start_process(
      {.what = "starting a worker process",
       .path = program.path,
       .arguments = program.arguments,
       .environment = environment,
       .stdin_fd = local_rank == 0 ? STDIN_FILENO : no_input_.get(),
       .stdout_fd = out ? out.get() : STDOUT_FILENO,
       .stderr_fd = err ? err.get() : STDERR_FILENO,
       .inherited_fds = {identity.master_listen_fd, memory_[at].get()},
       .cpus = options_.cpus.empty() ? std::set<int>() : options_.cpus[at],
       .surroundings = surroundings_},
      only_standby);
  if (!worker) return std::nullopt;
  worker->rank = rank;
  worker->error_file = identity.error_file;
  worker->last_lines = std::move(last_lines);
  return worker;
}

std::optional<WorkerGroup::Worker> WorkerGroup::start_process(
    const ChildStart& start, bool only_standby) {
  if (standby_ == nullptr && !options_.heals) {
    return Worker{.process = start_program(start)};
  }
  const auto with_socket = [&](ChildProcess process, FileDescriptor socket) {
    return Worker{.process = std::move(process),
                  .environment = start.environment,
                  .streams = stream_marks(start.stdout_fd, start.stderr_fd),
                  .socket = std::move(socket)};
  };
  if (standby_ != nullptr) {
    if (auto taken = take_standby(*standby_, start)) {
      ++stood_by_;
      return with_socket(std::move(taken->process), std::move(taken->socket));
    }
  }
  if (only_standby) return std::nullopt;
  auto [own, theirs] = standby_sockets(start.what);
  std::vector<std::string> environment = start.environment;
  environment.push_back(std::string(kStandbySocketVariable) + "=" +
                        descriptor_mark(theirs.get()));
  std::vector<int> inherited = start.inherited_fds;
  inherited.push_back(theirs.get());
  return with_socket(start_program({.what = start.what,
                                    .path = start.path,
                                    .arguments = start.arguments,
                                    .environment = environment,
                                    .stdin_fd = start.stdin_fd,
                                    .stdout_fd = start.stdout_fd,
                                    .stderr_fd = start.stderr_fd,
                                    .inherited_fds = std::move(inherited),
                                    .cpus = start.cpus,
                                    .surroundings = start.surroundings}),
                     std::move(own));
}

std::filesystem::path WorkerGroup::progress_file(int local_rank) const {
  return directory_.worker_directory(plan_.round, local_rank) /
         HangFinder::kProgressFile;
}

bool WorkerGroup::is_own(size_t local_rank) const {
  const Worker::Stage stage = workers_[local_rank].stage;
  return stage != Worker::Stage::kept && stage != Worker::Stage::given_up;
}

int WorkerGroup::rank_in_place(int place) const {
  if (places_.empty()) return place;
  return static_cast<int>(std::ranges::lower_bound(places_, place) -
                          places_.begin());
}

void WorkerGroup::number_ranks() {
  if (places_.empty()) return;
  place_.world_size = static_cast<int>(places_.size());
  place_.first_rank = rank_in_place(place_of(0));
  const NodePlace& at_first = plan_.place;
  if (at_first.role_world_size == at_first.world_size) {
    place_.role_world_size = place_.world_size;
    place_.first_role_rank = place_.first_rank;
  }
  for (size_t at = 0; at < workers_.size(); ++at) {
    workers_[at].rank = rank_in_place(place_of(at));
  }
}

std::vector<int> WorkerGroup::lost() const {
  std::vector<int> all;
  for (size_t at = 0; at < workers_.size(); ++at) {
    const Worker& worker = workers_[at];
    if (worker.stage == Worker::Stage::given_up) continue;
    if (worker.hung ||
        (worker.process.ended() && worker.process.exit_code() != 0)) {
      all.push_back(static_cast<int>(at));
    }
  }
  return all;
}

bool WorkerGroup::all_heal_fully() const {
  return std::ranges::all_of(workers_, [](const Worker& worker) {
    return worker.heals && worker.why_whole.empty();
  });
}

bool WorkerGroup::any_left_training() {
  return std::ranges::any_of(workers_, [this](Worker& worker) {
    if (!worker.process.ended() || worker.process.exit_code() != 0) {
      return false;
    }
    hear_all(worker);
    return worker.heals && !worker.ended_training &&
           worker.stage != Worker::Stage::given_up;
  });
}

std::optional<std::string> WorkerGroup::why_not_healed() {
  for (Worker& worker : workers_) hear_all(worker);
  const std::vector<int> gone = lost();
  if (gone.empty()) return "a rank of this node seems to be the cause";
  for (size_t at = 0; at < workers_.size(); ++at) {
    const Worker& worker = workers_[at];
    if (worker.stage == Worker::Stage::given_up) continue;
    const std::string rank = "rank " + std::to_string(rank_of(at));
    if (worker.ended_training) {
      return rank + " has ended its training, or cannot be healed any more";
    }
    if (!worker.heals) {
      return rank + " has not said that its training can be healed";
    }
    if (!worker.hung && worker.process.ended() &&
        worker.process.exit_code() == 0) {
      return rank + " has ended well";
    }
  }
  // A rank may have told of fewer ranks (hear_generation()) before this agent
  // knows that its announcement was made, so world_size() does not tell.
  const auto left = std::ranges::count_if(workers_, [](const Worker& worker) {
    return worker.stage != Worker::Stage::given_up;
  });
  if (place_.nnodes == 1 && std::ssize(gone) == left) return "no rank is left";
  return std::nullopt;
}

std::optional<std::string> WorkerGroup::why_not_without() const {
  for (size_t at = 0; at < workers_.size(); ++at) {
    if (!is_own(at) || workers_[at].why_whole.empty()) continue;
    return "the training cannot go on with fewer ranks: " +
           workers_[at].why_whole;
  }
  return std::nullopt;
}

int WorkerGroup::generation() const {
  int last = 0;
  for (const Worker& worker : workers_)
    last = std::max(last, worker.generation);
  return last;
}

void WorkerGroup::keep_places(std::vector<int> places) {
  if (places == places_) return;
  places_ = std::move(places);
  number_ranks();
  for (size_t at = 0; at < workers_.size(); ++at) {
    if (std::ranges::binary_search(places_, place_of(at))) continue;
    workers_[at].stage = Worker::Stage::given_up;
    workers_[at].socket.reset();
  }
  failed_ = !lost().empty();
  oom_kills_before_ = oom_kills();
}

std::optional<pid_t> WorkerGroup::replace(int local_rank, int generation) {
  Worker& worker = workers_[static_cast<size_t>(local_rank)];
  if (options_.tells_progress) {
    std::error_code ignored;
    std::filesystem::remove(progress_file(local_rank), ignored);
  }
  auto next = start_worker(local_rank, generation, /*only_standby=*/true);
  if (!next) return std::nullopt;
  // Workers of this attempt have left init_process_group(), so it may, too.
  next->stage = Worker::Stage::left;
  next->heals = true;
  next->why_whole = worker.why_whole;
  next->joins = true;
  std::destroy_at(&worker);
  std::construct_at(&worker, std::move(*next));
  failed_ = !lost().empty();
  oom_kills_before_ = oom_kills();
  return worker.process.pid();
}

bool WorkerGroup::any_joins() const {
  return std::ranges::any_of(workers_, [](const Worker& worker) {
    return worker.joins && !worker.process.ended();
  });
}

void WorkerGroup::kill_hung() {
  for (const Worker& worker : workers_) {
    if (worker.hung) worker.process.signal(SIGKILL);
  }
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
      hear_all(worker);
    }
  }
}

// The last words of a worker that has ended may not have been read yet.
void WorkerGroup::hear_all(Worker& worker) {
  while (worker.socket && hear(worker)) {
  }
}

bool WorkerGroup::hear(Worker& worker) {
  using Stage = Worker::Stage;
  std::array<char, 256> bytes;
  const ssize_t count =
      ::recv(worker.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (count < 0 && errno == EINTR) return true;
  if (count < 0 && errno == EAGAIN) return false;
  if (count <= 0) {
    worker.socket.reset();
    return false;
  }
  const std::string_view words(bytes.data(), static_cast<size_t>(count));
  const bool is_whole = words.starts_with(kStandbyHealsWhole);
  if (words == kStandbyHeals || is_whole) {
    worker.heals = true;
    worker.why_whole =
        is_whole ? words.substr(std::string_view(kStandbyHealsWhole).size())
                 : std::string_view();
    worker.joins = false;
    worker.stage = Stage::left;
  } else if (words == kStandbyHealsNoMore) {
    worker.heals = false;
    worker.ended_training = true;
  } else if (words.starts_with(kStandbyGeneration)) {
    hear_generation(worker, words);
  } else if (words == kStandbyMeets) {
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

void WorkerGroup::hear_generation(Worker& worker, std::string_view told) {
  int* const numbers[] = {&worker.generation, &worker.rank, &place_.world_size};
  for (int* number : numbers) {
    told.remove_prefix(std::min(told.find_first_of("0123456789"), told.size()));
    const auto [end, error] =
        std::from_chars(told.data(), told.data() + told.size(), *number);
    told.remove_prefix(static_cast<size_t>(end - told.data()));
  }
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

bool WorkerGroup::all_given_up() const {
  return std::ranges::all_of(workers_, [](const Worker& worker) {
    return worker.stage == Worker::Stage::given_up;
  });
}

std::vector<WorkerStatus> WorkerGroup::statuses() const {
  std::vector<WorkerStatus> all;
  for (size_t at = 0; at < workers_.size(); ++at) {
    const ChildProcess& process = workers_[at].process;
    WorkerStatus status;
    status.local_rank = static_cast<int>(at);
    status.rank = is_own(at) ? rank_of(at) : -1;
    status.pid = process.pid();
    // A kept worker's process is with the standby pool.
    if (process.ended() && workers_[at].stage != Worker::Stage::kept) {
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
      ranks.push_back(rank_of(at));
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
    if (workers_[at].stage == Worker::Stage::given_up) continue;
    const auto record = read_error_file(workers_[at].error_file);
    for (const int rank : record.named) {
      named.emplace(rank,
                    "rank " + std::to_string(rank_of(at)) + ": " +
                        record.message.substr(0, record.message.find('\n')));
    }
  }
  return named;
}

void WorkerGroup::look_for_causes(const NamedRanks& named) {
  named_elsewhere_ = named;
  for (size_t at = 0; at < workers_.size(); ++at) {
    if (!is_own(at)) continue;
    const auto record = read_error_file(workers_[at].error_file);
    const int rank = rank_of(at);
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
        named.contains(rank_of(at)) &&
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
    if (!is_own(at)) continue;
    WorkerFailure failure;
    failure.rank = rank_of(at);
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
        // That another rank had ended before says nothing about this end.
        if (failure.error.kind == FailureKind::echo) failure.error = {};
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
    failure.folder = worker.error_file.parent_path().lexically_relative(
        directory_.attempt_directory(plan_.round));
    all.push_back(std::move(failure));
  }
  std::ranges::sort(all, comes_before);
  return all;
}

}  // namespace lockstep::internal
