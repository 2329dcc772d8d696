#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/system_file.h"
#include "lockstep/launch/watch/job_link.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// A job as it was at one moment.
struct JobMoment {
  int64_t time_ns = 0;  // of the steady clock
  JobStatus status{};
  // Both are by local rank, as status.workers. An entry is nothing if the
  // worker has ended or, of the first, if it publishes nothing: it is not
  // a program of Lockstep, or has not come so far.
  std::vector<std::optional<RankStatus>> ranks{};
  std::vector<std::optional<ProcessUsage>> usage{};
};

// Asks the job's agent, and waits for its ranks. Throws as JobLink::watch().
JobMoment look_at(JobLink& link);

// How one worker did between two moments. What is not known is nothing.
struct WorkerView {
  WorkerStatus worker{};
  // "running"; "stopped" by a signal; "silent": it has published, and does not
  // any more; "done"; "exit 3"; "SIGKILL".
  std::string state{};
  std::optional<int64_t> steps{};
  std::optional<double> steps_per_second{};
  std::optional<double> samples_per_second{};
  std::optional<double> comm_share{};  // 0 to 1
  std::optional<double> cpu_share{};   // 1: one core
  std::optional<int64_t> resident_bytes{};
  // As GpuUsage (worker/nvml.h).
  std::optional<int> gpus{};
  std::optional<double> gpu_share{};  // 0 to 1
  std::optional<int64_t> gpu_memory_bytes{};
  std::optional<double> gpu_watts{};
  std::optional<int> gpu_celsius{};
  std::optional<double> snapshot_seconds{};  // since the last one
  std::optional<double> idle_seconds{};      // since its last step or operation
  std::string operation{};  // that is under way: "all_reduce 12 (world)"
  std::optional<double> operation_seconds{};  // since it began
  std::string progress{};
};

struct JobView {
  JobStatus status{};
  double running_seconds = 0;
  std::vector<WorkerView> workers{};
  std::optional<int> slowest_rank{};  // of this node, by slowest_rank()
};

// `before` may be of an earlier attempt; then there are no rates.
JobView view_of(const JobMoment& before, const JobMoment& now);

// The rank for which the others wait, in views that are shown one after
// another: another rank, or none, must have been found for some seconds before
// it is shown, since the rank changes from moment to moment if all are equally
// fast.
class LastingRank {
 public:
  // Takes what was found at `now_ns`, and returns what to show.
  std::optional<int> update(std::optional<int> rank, int64_t now_ns);

 private:
  std::optional<int> shown_{};
  std::optional<int> candidate_{};
  int64_t since_ns_ = INT64_MIN / 2;
};

// Returns one JSON document, with a newline.
std::string view_json(const JobView& view);

}  // namespace lockstep::internal
