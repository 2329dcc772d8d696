#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/cli/bench/figures.h"
#include "lockstep/cli/bench/operations.h"
#include "lockstep/cli/bench/options.h"

namespace lockstep::internal::bench {

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
