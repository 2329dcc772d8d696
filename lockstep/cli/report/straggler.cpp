#include "lockstep/cli/report/straggler.h"

#include <algorithm>
#include <array>

namespace lockstep::internal {
namespace {

constexpr double kNoticeable = 1.05;

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

// Returns the median over the steps of what `value` gives.
template <typename Value>
int64_t median_over(const std::vector<StepTime>& steps, Value value) {
  std::vector<int64_t> all;
  for (const StepTime& step : steps) all.push_back(value(step));
  return median(std::move(all));
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

int64_t own_median(const RankSteps& rank) {
  return median_over(rank.steps,
                     [](const StepTime& step) { return step.own(); });
}

Straggler examine(const std::vector<RankSteps>& ranks, size_t index) {
  Straggler one;
  one.rank = ranks[index].rank;
  one.own_ns = own_median(ranks[index]);
  one.others_ns = others_median(ranks, index, own_median);
  for (const NamedPart& each : kOwnParts) {
    const auto of_rank = [&](const RankSteps& rank) {
      return median_over(rank.steps,
                         [&](const StepTime& step) { return step.*each.part; });
    };
    const int64_t more =
        of_rank(ranks[index]) - others_median(ranks, index, of_rank);
    if (one.reason.empty() || more > one.reason_ns) {
      one.reason = each.name;
      one.reason_ns = more;
    }
  }
  for (size_t step = 0; step < ranks[index].steps.size(); ++step) {
    const auto own = [&](const RankSteps& rank) {
      return rank.steps[step].own();
    };
    if (own(ranks[index]) > others_median(ranks, index, own)) {
      ++one.slower_steps;
    }
  }
  return one;
}

}  // namespace

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
  int64_t slowest_other = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Straggler one = examine(ranks, i);
    longest = std::max(longest, one.own_ns);
    shortest = std::min(shortest, one.own_ns);
    if (static_cast<double>(one.own_ns) >
            kNoticeable * static_cast<double>(one.others_ns) &&
        2 * one.slower_steps > balance.steps) {
      balance.stragglers.push_back(one);
    } else {
      slowest_other = std::max(slowest_other, one.own_ns);
    }
  }
  if (!balance.stragglers.empty()) balance.lost_ns = longest - slowest_other;
  if (longest > 0) {
    balance.spread =
        static_cast<double>(longest - shortest) / static_cast<double>(longest);
  }
  std::ranges::stable_sort(balance.stragglers, std::ranges::greater(),
                           &Straggler::own_ns);
  return balance;
}

}  // namespace lockstep::internal
