#include "lockstep/cli/report/operator_times.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace lockstep::internal {
namespace {

// Returns the time of each activity of a thread without those inside it.
std::vector<int64_t> self_times(const std::vector<TraceActivity>& all) {
  std::vector<int64_t> self;
  std::vector<size_t> open;  // the last one is innermost
  for (size_t i = 0; i < all.size(); ++i) {
    self.push_back(all[i].time.length());
    // It ends when the work does, whatever its thread does meanwhile.
    if (all[i].activity == Activity::communication_in_flight) continue;
    while (!open.empty() && all[open.back()].time.end <= all[i].time.begin) {
      open.pop_back();
    }
    if (!open.empty()) {
      const int64_t end = std::min(all[i].time.end, all[open.back()].time.end);
      self[open.back()] -= end - all[i].time.begin;
    }
    open.push_back(i);
  }
  return self;
}

bool is_operator(Activity activity) {
  return activity == Activity::compute || activity == Activity::operators;
}

}  // namespace

void add_operator_times(const TraceFile& file,
                        std::map<std::string, OperatorTime>& times) {
  const bool has_device = file.has_device();
  std::vector<Interval> steps;
  for (const auto& [number, time] : file.steps) steps.push_back(time);
  std::ranges::sort(steps, {}, &Interval::begin);
  for (const TraceThread& thread : file.threads) {
    if (has_device && !thread.on_device) continue;
    const auto self = self_times(thread.activities);
    for (size_t i = 0; i < self.size(); ++i) {
      const TraceActivity& each = thread.activities[i];
      if (!is_operator(each.activity)) continue;
      // The last step that begins before it.
      const auto step = std::ranges::upper_bound(steps, each.time.begin, {},
                                                 &Interval::begin);
      if (step == steps.begin() || each.time.begin >= std::prev(step)->end) {
        continue;
      }
      OperatorTime& time = times[file.names[each.name]];
      ++time.calls;
      time.self_ns += self[i];
    }
  }
}

std::vector<OperatorTime> by_time(std::map<std::string, OperatorTime> times) {
  std::vector<OperatorTime> sorted;
  for (auto& [name, time] : times) {
    sorted.push_back(std::move(time));
    sorted.back().name = name;
  }
  std::ranges::stable_sort(sorted, std::ranges::greater(),
                           &OperatorTime::self_ns);
  return sorted;
}

}  // namespace lockstep::internal
