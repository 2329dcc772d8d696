#include "lockstep/cli/jobs/job_view.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// Two intervals of the board and some time to be scheduled.
constexpr std::chrono::milliseconds kFirstAnswer{500};
// A rank that has published nothing for so long is silent.
constexpr int64_t kSilentNs = 2'000'000'000;
// How long the others must have waited for a rank until it is named.
constexpr int64_t kLastingNs = 3'000'000'000;

double seconds(int64_t ns) { return static_cast<double>(ns) / 1e9; }

std::string state_of(const WorkerStatus& worker,
                     const std::optional<RankStatus>& rank,
                     const std::optional<ProcessUsage>& usage, int64_t now) {
  if (worker.signal) return signal_name(*worker.signal);
  if (worker.exit_code) {
    return *worker.exit_code == 0 ? "done"
                                  : "exit " + std::to_string(*worker.exit_code);
  }
  if (usage && (usage->state == 'T' || usage->state == 't')) return "stopped";
  if (rank && rank->has_left == 0 && now - rank->published_ns > kSilentNs) {
    return "silent";
  }
  return "running";
}

// Sets what needs two moments.
void set_rates(WorkerView& view, const RankStatus& before,
               const RankStatus& now) {
  const double passed = seconds(now.published_ns - before.published_ns);
  if (passed <= 0 || before.pid != now.pid) return;
  if (now.steps > 0) {
    view.steps_per_second =
        static_cast<double>(now.steps - before.steps) / passed;
  }
  if (now.samples > 0) {
    view.samples_per_second =
        static_cast<double>(now.samples - before.samples) / passed;
  }
  const int64_t observed = now.observed_ns - before.observed_ns;
  if (observed > 0) {
    view.comm_share = static_cast<double>(now.comm_ns - before.comm_ns) /
                      static_cast<double>(observed);
  }
}

void set_gpus(WorkerView& view, const RankStatus& rank) {
  view.gpus = rank.gpus;
  if (rank.gpu_busy_percent >= 0) view.gpu_share = rank.gpu_busy_percent / 100;
  if (rank.gpu_memory_bytes >= 0) view.gpu_memory_bytes = rank.gpu_memory_bytes;
  if (rank.gpu_watts >= 0) view.gpu_watts = rank.gpu_watts;
  if (rank.gpu_celsius >= 0) view.gpu_celsius = rank.gpu_celsius;
}

WorkerView worker_view(const JobMoment& before, const JobMoment& now,
                       size_t place) {
  WorkerView view;
  view.worker = now.status.workers[place];
  const auto& rank = now.ranks[place];
  const auto& usage = now.usage[place];
  view.state = state_of(view.worker, rank, usage, now.time_ns);
  const bool same = place < before.status.workers.size() &&
                    before.status.workers[place].pid == view.worker.pid;
  if (usage) {
    view.resident_bytes = usage->resident_bytes;
    const int64_t passed = now.time_ns - before.time_ns;
    if (same && before.usage[place] && passed > 0) {
      view.cpu_share =
          static_cast<double>(usage->cpu_ns - before.usage[place]->cpu_ns) /
          static_cast<double>(passed);
    }
  }
  if (!rank) return view;
  if (rank->steps > 0) view.steps = rank->steps;
  if (rank->gpus > 0) set_gpus(view, *rank);
  if (rank->last_snapshot_ns > 0) {
    view.snapshot_seconds = seconds(now.time_ns - rank->last_snapshot_ns);
  }
  const int64_t active = std::max(rank->last_step_ns, rank->last_operation_ns);
  if (active > 0) view.idle_seconds = seconds(now.time_ns - active);
  view.operation = current_operation(*rank);
  if (rank->current_since_ns > 0) {
    view.operation_seconds = seconds(now.time_ns - rank->current_since_ns);
  }
  view.progress = rank->progress.view();
  if (same && before.ranks[place]) set_rates(view, *before.ranks[place], *rank);
  return view;
}

std::optional<int> slowest(const std::vector<WorkerView>& workers) {
  std::vector<RankShare> shares;
  for (const WorkerView& view : workers) {
    if (view.comm_share) shares.push_back({*view.comm_share, view.worker.rank});
  }
  return slowest_rank(std::move(shares));
}

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

}  // namespace

JobMoment look_at(JobLink& link) {
  JobMoment moment;
  moment.status = link.watch();
  link.await_ranks(moment.status, kFirstAnswer);
  moment.time_ns = steady_ns();
  for (const WorkerStatus& worker : moment.status.workers) {
    auto rank = link.board().read(worker.local_rank);
    // A process that a worker has started may publish for it.
    moment.ranks.push_back(worker.exit_code ? std::nullopt : std::move(rank));
    moment.usage.push_back(worker.exit_code ? std::nullopt
                                            : usage_of(worker.pid));
  }
  return moment;
}

JobView view_of(const JobMoment& before, const JobMoment& now) {
  JobView view;
  view.status = now.status;
  view.running_seconds = seconds(now.time_ns - now.status.started_ns);
  for (size_t place = 0; place < now.status.workers.size(); ++place) {
    view.workers.push_back(worker_view(before, now, place));
  }
  view.slowest_rank = slowest(view.workers);
  return view;
}

std::optional<int> LastingRank::update(std::optional<int> rank,
                                       int64_t now_ns) {
  if (rank != candidate_) {
    candidate_ = rank;
    since_ns_ = now_ns;
  }
  if (now_ns - since_ns_ >= kLastingNs) shown_ = candidate_;
  return shown_;
}

std::string view_json(const JobView& view) {
  json workers = json::array();
  for (const WorkerView& worker : view.workers) {
    workers.push_back(
        {{"rank", worker.worker.rank},
         {"local_rank", worker.worker.local_rank},
         {"pid", worker.worker.pid},
         {"state", worker.state},
         {"exit_code", or_null(worker.worker.exit_code)},
         {"steps", or_null(worker.steps)},
         {"steps_per_second", or_null(worker.steps_per_second)},
         {"samples_per_second", or_null(worker.samples_per_second)},
         {"comm_share", or_null(worker.comm_share)},
         {"cpu_share", or_null(worker.cpu_share)},
         {"resident_bytes", or_null(worker.resident_bytes)},
         {"gpus", or_null(worker.gpus)},
         {"gpu_share", or_null(worker.gpu_share)},
         {"gpu_memory_bytes", or_null(worker.gpu_memory_bytes)},
         {"gpu_watts", or_null(worker.gpu_watts)},
         {"gpu_celsius", or_null(worker.gpu_celsius)},
         {"seconds_since_snapshot", or_null(worker.snapshot_seconds)},
         {"seconds_since_activity", or_null(worker.idle_seconds)},
         {"operation",
          worker.operation.empty() ? json(nullptr) : json(worker.operation)},
         {"operation_seconds", or_null(worker.operation_seconds)},
         {"progress", worker.progress}});
  }
  const JobStatus& job = view.status;
  const json all{{"format", 1},
                 {"run_id", job.run_id},
                 {"program", job.program},
                 {"agent_pid", job.agent_pid},
                 {"host", job.host},
                 {"state", name_of(job.state)},
                 {"running_seconds", view.running_seconds},
                 {"node_rank", job.node_rank},
                 {"nnodes", job.nnodes},
                 {"world_size", job.world_size},
                 {"restart", job.restart},
                 {"healings", job.healings},
                 {"max_restarts", job.max_restarts},
                 {"attempt_directory", job.attempt_directory},
                 {"standby", job.standby},
                 {"slowest_rank", or_null(view.slowest_rank)},
                 {"workers", workers}};
  return all.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::internal
