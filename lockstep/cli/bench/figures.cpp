#include "lockstep/cli/bench/figures.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace lockstep::internal::bench {
namespace {

double percentile(const std::vector<int64_t>& sorted, double share) {
  const double place = std::ceil(share * static_cast<double>(sorted.size()));
  const auto index = static_cast<size_t>(std::max(place, 1.0)) - 1;
  return static_cast<double>(sorted[index]) / 1000;
}

}  // namespace

Latencies of_slowest_rank(const std::vector<std::vector<int64_t>>& by_rank) {
  if (by_rank.empty() || by_rank[0].empty()) {
    throw std::runtime_error("a measurement without iterations");
  }
  std::vector<int64_t> slowest = by_rank[0];
  for (const auto& times : by_rank) {
    if (times.size() != slowest.size()) {
      throw std::runtime_error(
          "the ranks timed different numbers of iterations");
    }
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], times[i]);
    }
  }
  std::ranges::sort(slowest);
  return {.iterations = static_cast<int64_t>(slowest.size()),
          .min = percentile(slowest, 0),
          .p50 = percentile(slowest, 0.5),
          .p90 = percentile(slowest, 0.9),
          .p99 = percentile(slowest, 0.99),
          .max = percentile(slowest, 1)};
}

Latencies of_rounds(const std::vector<Latencies>& rounds) {
  const auto median_of = [&rounds](double Latencies::*field) {
    std::vector<double> values;
    for (const auto& round : rounds) values.push_back(round.*field);
    return median(std::move(values));
  };
  Latencies all{.iterations = 0,
                .min = rounds.at(0).min,
                .p50 = median_of(&Latencies::p50),
                .p90 = median_of(&Latencies::p90),
                .p99 = median_of(&Latencies::p99),
                .max = 0};
  for (const auto& round : rounds) {
    all.iterations += round.iterations;
    all.min = std::min(all.min, round.min);
    all.max = std::max(all.max, round.max);
  }
  return all;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values.at(middle)
                                : (values.at(middle - 1) + values[middle]) / 2;
}

std::optional<Bandwidths> bandwidths(int64_t bytes, double microseconds,
                                     double bus_factor) {
  if (bytes == 0 || microseconds <= 0) return std::nullopt;
  const double algorithm = static_cast<double>(bytes) / microseconds / 1000;
  return Bandwidths{algorithm, algorithm * bus_factor};
}

}  // namespace lockstep::internal::bench
