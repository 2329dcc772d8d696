#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/launch/process/awake_clock.h"

namespace lockstep::internal {

// The progress of one worker at one moment.
struct WorkerProgress {
  // Steps, samples and the like: any change is progress.
  std::array<int64_t, 7> counts{};
  bool in_operation = false;  // it may wait for other ranks
  // When its last operation began or ended, on the steady clock. Comes from the
  // worker itself, so it orders workers more finely than the looks do.
  int64_t active_ns = 0;
  bool stopped = false;  // by a signal, or by a debugger
};

// Decides whether a job hangs, and by which workers of this node. Knows no
// processes and no memory: HangFinder (hang_finder.h) reads what it is told.
//
// A worker is late if it has made no progress for `allowed`. A late worker that
// is in no operation of a process group, or is stopped, hangs. One that is in
// an operation waits for others: as long as any worker makes progress, it may
// be right to wait. If all are late and wait, the job hangs, too; then it is
// the worker whose last operation began or ended before those of the others,
// since they were still active when it was not any more.
//
// Time counts only while this process runs (awake_clock.h): a job that is
// suspended as a whole does not hang. For one thread.
class HangWatch {
 public:
  using Clock = AwakeClock::Clock;
  // How long more all workers must wait for each other, if there are other
  // nodes: the rank for which they wait may be on another node, and that node
  // knows better.
  static constexpr int kElsewhereShare = 4;  // a fourth of `allowed`

  // `allowed` is more than 0. `alone`: there are no other nodes.
  HangWatch(Clock::duration allowed, bool alone,
            Clock::time_point now = Clock::now());

  // How often look() must be called, at least.
  Clock::duration interval() const { return interval_; }
  // Returns the workers that hang, by local rank, the one first that made no
  // progress for the longest time; empty if the job goes on. `workers` has one
  // entry for each worker: nothing for one that has told nothing yet, or tells
  // nothing any more, which is not watched.
  std::vector<int> look(
      const std::vector<std::optional<WorkerProgress>>& workers,
      Clock::time_point now = Clock::now());
  // For how long a worker has made no progress, as of the last look; zero if it
  // is not watched.
  Clock::duration standing(int local_rank) const;
  bool alone() const { return alone_; }
  // Whether any worker has ever been watched.
  bool watches() const { return watches_; }
  // How much time has counted.
  Clock::duration awake() const { return clock_.awake(); }

 private:
  struct Seen {
    WorkerProgress last;
    Clock::duration since;  // awake_ when it last made progress
  };
  bool is_late(const std::optional<Seen>& seen) const;

  Clock::duration allowed_;
  bool alone_;
  Clock::duration interval_;
  AwakeClock clock_;
  std::vector<std::optional<Seen>> seen_{};
  bool watches_ = false;
};

}  // namespace lockstep::internal
