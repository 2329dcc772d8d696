#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/watch/hang_watch.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// A worker that was found to hang.
struct HungWorker {
  int local_rank = 0;
  // For people: for how long it has made no progress, what it does, and on
  // further lines what the others do.
  std::string message{};
  // The frames of its main thread, the innermost first; empty if it did not
  // answer.
  std::vector<std::string> stack{};
  // It waits in an operation, maybe for a rank of another node.
  bool waits_for_others = false;
};

// Watches the progress of the workers of one attempt on this node, and says
// which of them hang (HangWatch has the rules). A worker tells of its progress
// on the status board, from init_process_group() until it destroys the group,
// or by touching its progress file. Before a worker is said to hang, all are
// asked for their stacks, which also shows whether they still stand.
//
// For one thread. Does not wait for a worker. But look() returns workers that
// hang only after it has named the source lines of their stacks, which takes
// some seconds at most (explain(), source_finder.h).
class HangFinder {
 public:
  // The file in a worker's directory that it touches.
  static constexpr const char* kProgressFile = "progress";
  // Where the stacks of all ranks are written, in the attempt's directory.
  static constexpr const char* kStacksFile = "stacks.txt";

  // `board` may be null, and must outlive this. `attempt` is
  // RunDirectory::attempt_directory(). `alone`: there are no other nodes.
  HangFinder(std::chrono::milliseconds allowed, bool alone, StatusBoard* board,
             std::filesystem::path attempt);

  // How long a caller may sleep before it calls look().
  std::chrono::milliseconds most_wait() const { return next_.remaining(); }
  // Looks at the workers if it is time to. Returns those that hang; they are
  // found once only. Throws nothing but std::bad_alloc.
  std::vector<HungWorker> look(const std::vector<WorkerStatus>& workers);
  // Returns true once, if no worker has told anything for the allowed time.
  bool watches_nobody();

 private:
  using Progress = std::vector<std::optional<WorkerProgress>>;

  Progress read(const std::vector<WorkerStatus>& workers);
  bool all_have_answered(const Progress& progress) const;
  void drop_stacks(const std::vector<WorkerStatus>& workers) const;
  std::vector<HungWorker> found(const std::vector<int>& hanging,
                                const std::vector<WorkerStatus>& workers,
                                const Progress& progress);
  std::string doing(const WorkerStatus& worker,
                    const WorkerProgress& progress) const;

  const std::chrono::milliseconds allowed_;
  StatusBoard* const board_;
  const std::filesystem::path attempt_;
  HangWatch watch_;
  Deadline next_;
  // The contents of the board at the last look, by local rank.
  std::vector<std::optional<RankStatus>> told_{};
  // The request for stacks, while some worker seems to hang.
  int32_t request_ = 0;
  std::optional<Deadline> answers_until_{};
  bool has_warned_ = false;
};

}  // namespace lockstep::internal
