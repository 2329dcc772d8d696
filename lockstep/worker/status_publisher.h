#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// Tells the agent of this process what the process does, while somebody looks
// (`lockstep top`, `lockstep status`, the launcher's metrics).
//
// The agent listens at the abstract Unix socket that LOCKSTEP_AGENT names. A
// thread of the publisher asks it for its StatusBoard and then sleeps until
// somebody looks; from then on it reads the counters and the flight recorders
// of the process every StatusBoard::kInterval. So the training itself does
// nothing for this, and a rank that hangs is still seen.
//
// If there is no agent, it does not answer, or it has another board, nothing is
// told, and nothing else happens.
class StatusPublisher {
 public:
  // `rank` is this process's rank in the default group. Starts the thread if
  // LOCKSTEP_AGENT is set, and LOCAL_RANK, or LOCKSTEP_AGENT_PLACE if the
  // launcher gives all workers a LOCAL_RANK of 0. Throws nothing.
  explicit StatusPublisher(int rank) noexcept;
  // Publishes a last time, with has_left, and ends the thread.
  ~StatusPublisher();
  // Returns the rank on this host for which the others wait, in the last second
  // or so, if there is one. Has the ranks of this host publish meanwhile, so
  // the first call knows of none. Costs a lock. Any thread.
  static std::optional<int> slowest_rank();

  StatusPublisher(const StatusPublisher&) = delete;
  StatusPublisher& operator=(const StatusPublisher&) = delete;

 private:
  void run(const std::string& agent);
  bool attach(const std::string& agent);
  void take_profile_request();
  void take_stacks_request();
  void publish();
  void measure_gpus(int64_t now_ns);
  void compare_ranks(int64_t now_ns);

  const int rank_;
  int place_ = 0;
  std::optional<StatusBoard> board_{};
  std::string folder_{};  // for files of this attempt
  RankStatus status_{};
  int64_t gpus_measured_ns_ = 0;
  // The other ranks as they were read at `compared_ns_`, for slowest_rank().
  std::vector<RankStatus> ranks_before_{};
  int64_t compared_ns_ = 0;
  std::atomic<int64_t> compares_until_ns_{0};
  std::atomic<int> slowest_{-1};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
  std::thread thread_;
};

// Adds to `status` what the flight recorders of this process know: the
// operations, the oldest one that is under way, and for how long at least one
// was under way since `since_ns`, until `now_ns`.
void read_operations(RankStatus& status, int64_t since_ns, int64_t now_ns);

}  // namespace lockstep::internal
