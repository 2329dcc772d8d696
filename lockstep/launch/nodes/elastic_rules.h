#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// The rules of docs/elastic.md by which the host of the agents' store decides.
struct ElasticOptions {
  // How long the first round stays open for more nodes once there are enough.
  std::chrono::milliseconds last_call{30'000};
  // How long a node that has come waits at most for the program's next
  // snapshot.
  std::chrono::milliseconds scale_up_wait{300'000};
  // A node whose workers were the cause of `failures` failures within `within`
  // is left out for `cooling`. 0 means never.
  int failures = 0;
  std::chrono::milliseconds within{600'000};
  std::chrono::milliseconds cooling{600'000};
};

// A node that offers to take part in a round.
struct Candidate {
  int node_rank = 0;
  // Its place in the last round in which it took part, and the number of that
  // round; below 0: there was none.
  int last_place = -1;
  int last_round = -1;
};

// Returns the node ranks of all candidates in the order of their places
// (GROUP_RANK). A node keeps its last place if that is below the number of
// candidates; of two with one place, the node that had it in the later round.
// The others fill the places that are left, in the order of their last places,
// and those without one in the order of their node ranks.
std::vector<int> order_members(std::vector<Candidate> candidates);

// When a round of a job with MIN to MAX nodes begins, when a node that waits is
// let in, and which nodes are left out for a while. Knows no store and no
// clock. For one thread.
class ElasticRules {
 public:
  using Clock = std::chrono::steady_clock;

  ElasticRules(ElasticOptions options, int fewest, int most)
      : options_(options), fewest_(fewest), expected_(most) {}

  // The first round waits for `nodes`, or else for the last call, and not for
  // MAX nodes: those of a job whose store was lost are mostly fewer.
  void expect(int nodes) { expected_ = nodes; }
  int expected() const { return expected_; }

  // Returns whether a round begins with `present` nodes, which have offered.
  // `all_offered`: no other node has joined the job. `first`: the nodes of this
  // store have not met before.
  bool may_begin(int present, bool all_offered, bool first,
                 Clock::time_point now);
  // A round has begun; no node waits for the next one.
  void begin_round();

  // Tells that so many nodes wait while a round runs. The wait of the first of
  // them counts. Returns true once for each round, when a wait begins.
  bool note_waiting(int count, Clock::time_point now);
  bool waiting() const { return waits_until_.has_value(); }
  // A snapshot has been written since the wait began.
  void note_snapshot() { snapshot_ = true; }
  // Returns whether the nodes that wait are let in now.
  bool may_grow(Clock::time_point now) const {
    return waits_until_ && (snapshot_ || now >= *waits_until_);
  }

  // The workers of the agent `id` were the cause of a failure. Returns true if
  // the agent is left out from now on.
  bool note_failure(const std::string& id, Clock::time_point now);
  bool is_left_out(const std::string& id, Clock::time_point now);

 private:
  ElasticOptions options_;
  int fewest_;
  int expected_;
  std::optional<Clock::time_point> last_call_{};
  std::optional<Clock::time_point> waits_until_{};
  bool snapshot_ = false;
  std::map<std::string, std::deque<Clock::time_point>> failures_{};
  std::map<std::string, Clock::time_point> left_out_until_{};
};

}  // namespace lockstep::internal
