#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/bench/operations.h"
#include "lockstep/cli/bench/options.h"

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

// One thing to measure.
struct Configuration {
  Operation operation;
  DType dtype;
  int ranks;
  int64_t elements;  // of S, see operations.h
  int64_t bytes() const { return elements * dtype.bytes; }
};

// The figures of one side.
struct Figures {
  std::string side;
  std::string error{};  // why there are no figures; only for peers
  std::vector<Latencies> rounds{};
  int64_t wrong = 0;  // elements, on all ranks together

  Latencies latencies() const { return of_rounds(rounds); }
};

// A peer's median latency divided by ours: above 1, ours is faster.
struct Ratio {
  double value;  // of the medians
  double min;    // of the ratios within each round
  double max;
};
Ratio ratio(const Figures& peer, const Figures& ours);

// Prints the table, line by line as figures come. docs/benchmarks.md has its
// columns.
class Table {
 public:
  Table(std::FILE* out, const Options& options,
        std::vector<std::string> peer_names);
  void add_machine(const nlohmann::ordered_json& machine);
  // Prints what stands before the rows of one operation, dtype and world.
  void add_heading(const Configuration& configuration);
  // `figures` are ours, then the peers'.
  void add_row(const Configuration& configuration,
               const std::vector<Figures>& figures);
  // Prints, after the rows, every side's median latency; without peers nothing.
  void add_comparison();

 private:
  std::FILE* out_;
  const Options& options_;
  std::vector<std::string> peer_names_;
  std::vector<std::string> comparison_;  // its rows
};

// Returns the entries of the JSON's "results", one for each side.
nlohmann::ordered_json to_json(const Configuration& configuration,
                               const Options& options,
                               const std::vector<Figures>& figures);

// Returns the whole JSON, with `results` in it.
nlohmann::ordered_json document(const Options& options,
                                const nlohmann::ordered_json& machine,
                                const nlohmann::ordered_json& sides,
                                nlohmann::ordered_json results, double seconds);

}  // namespace lockstep::internal::bench
