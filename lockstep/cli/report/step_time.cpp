#include "lockstep/cli/report/step_time.h"

#include <algorithm>
#include <limits>

namespace lockstep::internal {
namespace {

// The moments of one thread.
struct ThreadMoments {
  // Operators that only compute; others and optimizers that hold no other
  // event.
  Intervals computing{};
  Intervals compute{};
  Intervals optimizer{};
  Intervals communication{};
  Intervals in_flight{};
  Intervals snapshot{};
  Intervals loader{};
  Intervals background{};
};

// Returns whether the rank computes as long as the event `index` lasts. If it
// may wait for other ranks, it must hold no other event: communication that
// goes on after it was only started there.
bool computes(const std::vector<TraceActivity>& all, size_t index) {
  const Activity activity = all[index].activity;
  if (activity == Activity::compute) return true;
  if (activity != Activity::operators && activity != Activity::optimizer) {
    return false;
  }
  const int64_t end = all[index].time.end;
  for (size_t i = index + 1; i < all.size() && all[i].time.begin < end; ++i) {
    if (all[i].activity != Activity::communication_in_flight ||
        all[i].time.end <= end) {
      return false;
    }
  }
  return true;
}

ThreadMoments moments_of(const TraceThread& thread, bool calls_count) {
  const auto& all = thread.activities;
  const auto of = [&](auto&& wanted) {
    std::vector<Interval> parts;
    for (const TraceActivity& each : all) {
      if (wanted(each.activity)) parts.push_back(each.time);
    }
    return united(std::move(parts));
  };
  const auto of_kind = [&](Activity activity) {
    return of([&](Activity each) { return each == activity; });
  };
  ThreadMoments moments;
  std::vector<Interval> computing;
  for (size_t i = 0; i < all.size(); ++i) {
    if (computes(all, i)) computing.push_back(all[i].time);
  }
  moments.computing = united(std::move(computing));
  moments.compute = of([](Activity each) {
    return each == Activity::compute || each == Activity::operators;
  });
  moments.optimizer = of_kind(Activity::optimizer);
  moments.communication = of([&](Activity each) {
    return each == Activity::communication ||
           (calls_count && each == Activity::communication_call);
  });
  moments.in_flight = of_kind(Activity::communication_in_flight);
  moments.snapshot = of_kind(Activity::snapshot);
  moments.loader = of_kind(Activity::loader);
  moments.background = of_kind(Activity::background);
  return moments;
}

void add(Intervals& set, const Intervals& more) { set = unite(set, more); }

}  // namespace

RankActivity rank_activity(const std::vector<TraceThread>& threads) {
  const bool has_device = std::ranges::any_of(threads, [](const auto& thread) {
    return thread.on_device && !thread.activities.empty();
  });
  RankActivity rank;
  for (const TraceThread& thread : threads) {
    const ThreadMoments moments = moments_of(thread, !has_device);
    add(rank.communication, moments.communication);
    add(rank.communication, moments.in_flight);
    add(rank.snapshot, subtract(moments.snapshot, moments.communication));
    add(rank.loader, subtract(moments.loader, moments.communication));
    if (has_device && !thread.on_device) continue;
    // The operators by which a thread communicates, saves or loads are a part
    // of that.
    const Intervals other =
        unite(unite(moments.communication, moments.snapshot),
              unite(moments.loader, moments.background));
    const Intervals computing = subtract(moments.computing, other);
    add(rank.optimizing, intersect(computing, moments.optimizer));
    add(rank.computing, computing);
    if (has_device) continue;
    add(rank.around_optimizer, subtract(moments.optimizer, other));
    add(rank.around_compute, subtract(moments.compute, other));
  }
  return rank;
}

StepTime& StepTime::operator+=(const StepTime& other) {
  compute += other.compute;
  optimizer += other.optimizer;
  exposed += other.exposed;
  loader += other.loader;
  snapshot += other.snapshot;
  idle += other.idle;
  overlapped += other.overlapped;
  return *this;
}

StepTime step_time(const RankActivity& activity, Interval step) {
  const Intervals computing = clip(activity.computing, step);
  const Intervals communication = clip(activity.communication, step);
  StepTime time;
  time.overlapped = total_length(intersect(computing, communication));
  time.optimizer =
      total_length(intersect(computing, clip(activity.optimizing, step)));
  time.compute = total_length(computing) - time.optimizer;

  // The remaining time goes to the first of the others that claims it.
  Intervals left = subtract(united({step}), computing);
  const auto take = [&](const Intervals& claim) {
    const Intervals taken = intersect(left, clip(claim, step));
    left = subtract(left, taken);
    return total_length(taken);
  };
  time.snapshot = take(activity.snapshot);
  time.loader = take(activity.loader);
  time.exposed = take(activity.communication);
  time.optimizer += take(activity.around_optimizer);
  time.compute += take(activity.around_compute);
  time.idle = total_length(left);
  return time;
}

double flops_within(const std::vector<TraceThread>& threads, Interval window) {
  double flops = 0;
  for (const TraceThread& thread : threads) {
    const auto& all = thread.activities;
    int64_t counted_until = std::numeric_limits<int64_t>::min();
    auto each = std::ranges::lower_bound(
        all, window.begin, {}, [](const auto& one) { return one.time.begin; });
    for (; each != all.end() && each->time.begin < window.end; ++each) {
      if (each->flops == 0 || each->time.begin < counted_until) continue;
      flops += each->flops;
      counted_until = each->time.end;
    }
  }
  return flops;
}

}  // namespace lockstep::internal
