#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::bench {

// The latencies of one measurement or of all its rounds, in microseconds.
struct Latencies {
  int64_t iterations = 0;
  double min = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

// The time of an iteration is that of its slowest rank. `by_rank` holds each
// rank's nanoseconds, one number an iteration, in one order. Percentiles are
// by nearest rank. At least one rank and one iteration, as many from each:
// else std::runtime_error.
Latencies of_slowest_rank(const std::vector<std::vector<int64_t>>& by_rank);

// Least and greatest of all, medians of the percentiles. At least one round.
Latencies of_rounds(const std::vector<Latencies>& rounds);

// The mean of the middle two where the number is even. Not empty.
double median(std::vector<double> values);

// 1e9 bytes a second; from the median latency. Nothing where no data moves.
struct Bandwidths {
  double algorithm = 0;
  double bus = 0;
};
std::optional<Bandwidths> bandwidths(int64_t bytes, double microseconds,
                                     double bus_factor);

}  // namespace lockstep::bench
