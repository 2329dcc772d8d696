#include "lockstep/launch/watch/hang_watch.h"

#include <algorithm>
#include <cstddef>
#include <functional>

namespace lockstep::internal {
namespace {

using namespace std::chrono_literals;

constexpr HangWatch::Clock::duration kShortestInterval = 100ms;
constexpr HangWatch::Clock::duration kLongestInterval = 2s;
// A busy machine delays a look by so much without having stood still.
constexpr HangWatch::Clock::duration kDelay = 1s;

}  // namespace

HangWatch::HangWatch(Clock::duration allowed, bool alone, Clock::time_point now)
    : allowed_(allowed),
      alone_(alone),
      interval_(std::clamp(allowed / 10, kShortestInterval, kLongestInterval)),
      clock_(interval_ + kDelay, now) {}

bool HangWatch::is_late(const std::optional<Seen>& seen) const {
  return seen && clock_.awake() - seen->since >= allowed_;
}

std::vector<int> HangWatch::look(
    const std::vector<std::optional<WorkerProgress>>& workers,
    Clock::time_point now) {
  clock_.tick(now);
  seen_.resize(workers.size());
  for (size_t at = 0; at < workers.size(); ++at) {
    auto& seen = seen_[at];
    if (!workers[at]) {
      seen.reset();
    } else {
      watches_ = true;
      const bool moved = !seen || seen->last.counts != workers[at]->counts;
      seen = Seen{*workers[at], moved ? clock_.awake() : seen->since};
    }
  }
  std::vector<int> hanging;
  std::vector<int> waiting;
  bool any_goes_on = false;
  for (size_t at = 0; at < seen_.size(); ++at) {
    const auto& seen = seen_[at];
    if (!is_late(seen)) {
      any_goes_on = any_goes_on || seen.has_value();
    } else if (seen->last.in_operation && !seen->last.stopped) {
      waiting.push_back(static_cast<int>(at));
    } else {
      hanging.push_back(static_cast<int>(at));
    }
  }
  if (!hanging.empty()) {
    std::ranges::stable_sort(hanging, std::ranges::greater(),
                             [this](int worker) { return standing(worker); });
    return hanging;
  }
  if (any_goes_on || waiting.empty()) return {};
  if (!alone_ && std::ranges::any_of(waiting, [this](int worker) {
        return standing(worker) < allowed_ + allowed_ / kElsewhereShare;
      })) {
    return {};
  }
  const auto first = std::ranges::min_element(waiting, {}, [this](int worker) {
    return seen_[static_cast<size_t>(worker)]->last.active_ns;
  });
  return {*first};
}

HangWatch::Clock::duration HangWatch::standing(int local_rank) const {
  const auto at = static_cast<size_t>(local_rank);
  if (at >= seen_.size() || !seen_[at]) return Clock::duration::zero();
  return clock_.awake() - seen_[at]->since;
}

}  // namespace lockstep::internal
