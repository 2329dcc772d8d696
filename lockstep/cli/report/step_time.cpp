#include "lockstep/cli/report/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

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

// The part of a step by which a straggler must be slower.
constexpr double kNoticeable = 0.05;

using Part = int64_t StepTime::*;
struct NamedPart {
  const char* name;
  Part part;
};
constexpr std::array kOwnParts{
    NamedPart{"compute", &StepTime::compute},
    NamedPart{"optimizer", &StepTime::optimizer},
    NamedPart{"loader", &StepTime::loader},
    NamedPart{"snapshot", &StepTime::snapshot},
    NamedPart{"idle", &StepTime::idle},
};

constexpr size_t kNoStep = SIZE_MAX;

// Returns the mean over the steps, but the one at `left_out`, of what `value`
// gives.
template <typename Value>
int64_t mean_over(const std::vector<StepTime>& steps, size_t left_out,
                  Value value) {
  int64_t sum = 0;
  int64_t count = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i == left_out) continue;
    sum += value(steps[i]);
    ++count;
  }
  return count > 0 ? sum / count : 0;
}

// Returns the median over all ranks but `without`.
template <typename Value>
int64_t others_median(const std::vector<RankSteps>& ranks, size_t without,
                      Value value) {
  std::vector<int64_t> all;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i != without) all.push_back(value(ranks[i]));
  }
  return median(std::move(all));
}

int64_t own_of(const StepTime& step) { return step.own(); }

// Returns by how much the rank's own time is above the others' in the mean.
int64_t excess(const std::vector<RankSteps>& ranks, size_t index,
               size_t left_out) {
  const auto own = [&](const RankSteps& rank) {
    return mean_over(rank.steps, left_out, own_of);
  };
  return own(ranks[index]) - others_median(ranks, index, own);
}

bool is_noticeable(const std::vector<RankSteps>& ranks, size_t index,
                   size_t left_out) {
  const int64_t step =
      mean_over(ranks[index].steps, left_out, std::mem_fn(&StepTime::total));
  return static_cast<double>(excess(ranks, index, left_out)) >
         kNoticeable * static_cast<double>(step);
}

// Returns whether chance alone may explain that the own time of a rank differs
// from the others' by these amounts in the steps. That is so if the mean is not
// some times larger than its standard error: more times for a rank that is the
// faster one in other steps, for few steps, whose standard error is itself
// uncertain, and for many ranks, of which one is always the slowest. (Of ranks
// that vary equally by a fifth of a step, 2 to 7 in a hundred reports over 10
// steps name one.)
bool is_noise(const std::vector<double>& differences, double deviation,
              size_t ranks) {
  constexpr double kHardlyEver = 0.1;
  const auto count = static_cast<double>(differences.size());
  double slower = 0;
  double faster = 0;
  for (const double each : differences) (each > 0 ? slower : faster) += each;
  const bool is_one_sided = -faster < kHardlyEver * slower;
  const double least = (is_one_sided ? 1.75 : 2.5) +
                       0.35 * std::log2(static_cast<double>(ranks) / 2);
  const double few = 1 + 4 / ((count - 1) * (count - 1));
  return (slower + faster) / count <=
         least * few * deviation / std::sqrt(count);
}

// The standard deviation of two values or more.
double deviation_of(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  const double mean =
      std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / (count - 1));
}

struct Examined {
  Straggler rank{};
  bool is_slower = false;  // in the mean
  bool is_noise = false;
};

Examined examine(const std::vector<RankSteps>& ranks, size_t index) {
  Straggler one;
  one.rank = ranks[index].rank;
  const auto mean_own = [](const RankSteps& rank) {
    return mean_over(rank.steps, kNoStep, own_of);
  };
  one.own_ns = mean_own(ranks[index]);
  one.others_ns = others_median(ranks, index, mean_own);
  for (const NamedPart& each : kOwnParts) {
    const auto of_rank = [&](const RankSteps& rank) {
      return mean_over(rank.steps, kNoStep, std::mem_fn(each.part));
    };
    const int64_t more =
        of_rank(ranks[index]) - others_median(ranks, index, of_rank);
    if (one.reason.empty() || more > one.reason_ns) {
      one.reason = each.name;
      one.reason_ns = more;
    }
  }
  const size_t steps = ranks[index].steps.size();
  size_t slowest = 0;
  int64_t most = INT64_MIN;
  std::vector<double> differences;
  for (size_t step = 0; step < steps; ++step) {
    const auto own = [&](const RankSteps& rank) {
      return rank.steps[step].own();
    };
    const int64_t more = own(ranks[index]) - others_median(ranks, index, own);
    differences.push_back(static_cast<double>(more));
    if (more > 0) ++one.slower_steps;
    if (more > most) {
      most = more;
      slowest = step;
    }
  }
  Examined examined;
  examined.is_slower = is_noticeable(ranks, index, kNoStep) &&
                       (steps == 1 || is_noticeable(ranks, index, slowest));
  if (steps > 1) {
    const double deviation = deviation_of(differences);
    one.spread_ns = std::llround(deviation);
    examined.is_noise = is_noise(differences, deviation, ranks.size());
  }
  examined.rank = std::move(one);
  return examined;
}

// Returns what a step would be shorter in the mean without the stragglers.
int64_t lost_time(const std::vector<RankSteps>& ranks,
                  const std::vector<bool>& is_straggler) {
  const size_t steps = ranks.front().steps.size();
  int64_t sum = 0;
  for (size_t step = 0; step < steps; ++step) {
    int64_t slowest = 0;
    int64_t slowest_other = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int64_t own = ranks[i].steps[step].own();
      slowest = std::max(slowest, own);
      if (!is_straggler[i]) slowest_other = std::max(slowest_other, own);
    }
    sum += slowest - slowest_other;
  }
  return sum / static_cast<int64_t>(steps);
}

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

int64_t median(std::vector<int64_t> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  if (values.size() % 2 == 1) return values[middle];
  return values[middle - 1] + (values[middle] - values[middle - 1]) / 2;
}

Balance compare_ranks(const std::vector<RankSteps>& ranks) {
  Balance balance;
  if (ranks.size() < 2) return balance;
  balance.steps = ranks.front().steps.size();
  if (balance.steps == 0) return balance;
  int64_t longest = 0;
  int64_t shortest = INT64_MAX;
  std::vector<bool> is_straggler;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Examined one = examine(ranks, i);
    longest = std::max(longest, one.rank.own_ns);
    shortest = std::min(shortest, one.rank.own_ns);
    is_straggler.push_back(one.is_slower && !one.is_noise);
    if (one.is_slower) {
      (one.is_noise ? balance.doubtful : balance.stragglers)
          .push_back(one.rank);
    }
  }
  balance.lost_ns = lost_time(ranks, is_straggler);
  if (longest > 0) {
    balance.spread =
        static_cast<double>(longest - shortest) / static_cast<double>(longest);
  }
  for (auto* found : {&balance.stragglers, &balance.doubtful}) {
    std::ranges::stable_sort(*found, std::ranges::greater(),
                             &Straggler::own_ns);
  }
  return balance;
}

}  // namespace lockstep::internal
