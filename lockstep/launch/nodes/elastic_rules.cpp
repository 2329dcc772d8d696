#include "lockstep/launch/nodes/elastic_rules.h"

#include <algorithm>
#include <tuple>

namespace lockstep::internal {

std::vector<int> order_members(std::vector<Candidate> candidates) {
  const auto count = static_cast<int>(candidates.size());
  // The node that had a place last comes first, and so gets it.
  std::ranges::sort(candidates, [](const auto& one, const auto& other) {
    return std::tuple(-one.last_round, one.node_rank) <
           std::tuple(-other.last_round, other.node_rank);
  });
  std::vector<int> places(candidates.size(), -1);
  std::vector<Candidate> others;
  for (const Candidate& one : candidates) {
    const bool has_place = one.last_place >= 0;
    if (has_place && one.last_place < count &&
        places[static_cast<size_t>(one.last_place)] < 0) {
      places[static_cast<size_t>(one.last_place)] = one.node_rank;
    } else {
      others.push_back(one);
    }
  }
  std::ranges::sort(others, [](const auto& one, const auto& other) {
    const auto order = [](const Candidate& node) {
      return std::tuple(node.last_place < 0, node.last_place, node.node_rank);
    };
    return order(one) < order(other);
  });
  size_t next = 0;
  for (int& place : places) {
    if (place < 0) place = others[next++].node_rank;
  }
  return places;
}

bool ElasticRules::may_begin(int present, bool all_offered, bool first,
                             Clock::time_point now) {
  if (present < fewest_) return false;
  if (!first) return all_offered;
  if (present >= expected_) return true;
  if (!last_call_) last_call_ = now + options_.last_call;
  return now >= *last_call_;
}

void ElasticRules::begin_round() {
  waits_until_.reset();
  snapshot_ = false;
}

bool ElasticRules::note_waiting(int count, Clock::time_point now) {
  if (count == 0) waits_until_.reset();
  if (count == 0 || waits_until_) return false;
  waits_until_ = now + options_.scale_up_wait;
  snapshot_ = false;
  return true;
}

bool ElasticRules::note_failure(const std::string& id, Clock::time_point now) {
  if (options_.failures == 0) return false;
  auto& times = failures_[id];
  times.push_back(now);
  while (now - times.front() > options_.within) times.pop_front();
  if (static_cast<int>(times.size()) < options_.failures) return false;
  times.clear();
  left_out_until_[id] = now + options_.cooling;
  return true;
}

bool ElasticRules::is_left_out(const std::string& id, Clock::time_point now) {
  const auto found = left_out_until_.find(id);
  return found != left_out_until_.end() && now < found->second;
}

}  // namespace lockstep::internal
