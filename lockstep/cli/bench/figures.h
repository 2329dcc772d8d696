#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::internal::bench {

// The latencies of one measurement or of all its rounds, in microseconds.
struct Latencies {
  int64_t iterations = 0;
  double min = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

// Returns the latencies of a measurement; the time of an iteration is that of
// its slowest rank. `by_rank` holds the nanoseconds of each rank, one number
// for each iteration, in the same order. Percentiles are by nearest rank, in
// the statistical sense. Throws std::runtime_error unless there is at least one
// rank and one iteration, and as many iterations from each rank.
Latencies of_slowest_rank(const std::vector<std::vector<int64_t>>& by_rank);

// Returns the least and the greatest latency of all rounds, and the medians of
// the rounds' percentiles. There must be at least one round.
Latencies of_rounds(const std::vector<Latencies>& rounds);

// Returns the median: the mean of the middle two if there is an even number.
// `values` must not be empty.
double median(std::vector<double> values);

// In 1e9 bytes per second, from the median latency.
struct Bandwidths {
  double algorithm = 0;
  double bus = 0;
};
// Returns nothing if no data moves.
std::optional<Bandwidths> bandwidths(int64_t bytes, double microseconds,
                                     double bus_factor);

}  // namespace lockstep::internal::bench
