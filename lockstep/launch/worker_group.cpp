#include "lockstep/launch/worker_group.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "lockstep/launch/worker_environment.h"

namespace lockstep {
namespace {

FileDescriptor open_file(const std::string& path, int flags) {
  FileDescriptor fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd) throw_errno("opening " + path);
  return fd;
}

// One output stream of one worker: where it goes by the options. Owns nothing
// where the worker writes to the launcher's own.
FileDescriptor route_stream(const OutputOptions& options,
                            const std::string& role, int local_rank, int rank,
                            Streams stream, const RunDirectory& run_directory,
                            const std::filesystem::path& directory,
                            OutputMux& mux) {
  const bool shown = !options.local_ranks_filter ||
                     options.local_ranks_filter->count(local_rank) > 0;
  const bool redirected = includes(options.redirects.of(local_rank), stream);
  const bool teed = includes(options.tee.of(local_rank), stream) ||
                    (options.prefix_lines && !redirected);
  const bool to_file =
      run_directory.keeps_logs() &&
      (redirected || includes(options.tee.of(local_rank), stream));

  FileDescriptor file;
  if (to_file) {
    const bool out = stream == Streams::out;
    file = open_file(directory / (out ? "stdout.log" : "stderr.log"),
                     O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
  }
  if (teed && shown) {
    return mux.add_stream(stream == Streams::out ? OutputMux::Console::out
                                                 : OutputMux::Console::err,
                          line_prefix(options, role, local_rank, rank),
                          std::move(file));
  }
  if (file) return file;
  return shown ? FileDescriptor() : open_file("/dev/null", O_WRONLY);
}

}  // namespace

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options,
                         const RoundPlan& plan, int master_listen_fd,
                         const RunDirectory& directory,
                         const sigset_t& signal_mask, OutputMux& mux)
    : first_rank_(plan.place.first_rank) {
  const std::vector<std::string> inherited = current_environment();
  const FileDescriptor no_input = open_file("/dev/null", O_RDONLY);
  // set_ended() points into it.
  workers_.reserve(static_cast<size_t>(options.nproc_per_node));
  for (int rank = 0; rank < options.nproc_per_node; ++rank) {
    const auto path = directory.worker_directory(plan.round, rank);
    error_files_.push_back(path / "error.json");

    WorkerIdentity identity;
    identity.local_rank = rank;
    identity.place = plan.place;
    identity.master_addr = plan.master_addr;
    identity.master_port = plan.master_port;
    identity.restart_count = plan.round;
    identity.local_world_size = options.nproc_per_node;
    identity.role = options.role;
    identity.max_restarts = options.max_restarts;
    identity.run_id = options.run_id;
    identity.error_file = error_files_.back();
    identity.master_listen_fd = rank == 0 ? master_listen_fd : -1;
    const auto environment = worker_environment(identity, inherited);

    const auto route = [&](Streams stream) {
      return route_stream(options.output, options.role, rank,
                          first_rank_ + rank, stream, directory, path, mux);
    };
    const FileDescriptor out = route(Streams::out);
    const FileDescriptor err = route(Streams::err);
    WorkerStart start{options.program, environment};
    start.stdin_fd = rank == 0 ? 0 : no_input.get();
    if (out) start.stdout_fd = out.get();
    if (err) start.stderr_fd = err.get();
    start.inherited_fd = identity.master_listen_fd;
    start.signal_mask = signal_mask;
    workers_.push_back(WorkerProcess::start(start));
  }
}

void WorkerGroup::signal_process_groups(int signal) const {
  for (const auto& worker : workers_) worker.signal_group(signal);
}

void WorkerGroup::kill_workers() const {
  for (const auto& worker : workers_) worker.signal_process(SIGKILL);
}

size_t WorkerGroup::running() const {
  return static_cast<size_t>(
      std::count_if(workers_.begin(), workers_.end(),
                    [](const auto& worker) { return !worker.ended(); }));
}

void WorkerGroup::set_ended(pid_t pid, int wait_status) {
  for (auto& worker : workers_) {
    if (worker.pid() != pid || worker.ended()) continue;
    worker.set_ended(wait_status);
    if (!settled_ && worker.exit_code() != 0) {
      failed_ = more_telling(failed_, &worker);
    }
  }
}

const WorkerProcess* WorkerGroup::more_telling(
    const WorkerProcess* one, const WorkerProcess* other) const {
  if (one == nullptr) return other;
  const bool one_killed = one->ending_signal().has_value();
  const bool other_killed = other->ending_signal().has_value();
  if (one_killed != other_killed) return one_killed ? one : other;
  return std::min(one, other);  // both lie in workers_, in rank order
}

std::optional<WorkerFailure> WorkerGroup::first_failure() const {
  if (failed_ == nullptr) return std::nullopt;
  const auto rank = static_cast<size_t>(failed_ - workers_.data());
  WorkerFailure failure;
  failure.rank = first_rank_ + static_cast<int>(rank);
  failure.local_rank = static_cast<int>(rank);
  failure.pid = failed_->pid();
  failure.exit_code = failed_->exit_code();
  failure.signal = failed_->ending_signal();
  failure.lifetime = failed_->lifetime();
  failure.message = read_error_file(error_files_[rank]);
  return failure;
}

}  // namespace lockstep
