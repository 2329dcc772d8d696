#include "lockstep/cli/bench/tune.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "lockstep/cli/bench/figures.h"
#include "lockstep/cli/bench/report.h"
#include "lockstep/cli/bench/sides.h"
#include "lockstep/cli/bench/world.h"
#include "lockstep/comm/shm/tuning_file.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using shm::Tuning;

constexpr size_t kKiB = 1024;
constexpr int kMostRanks = 64;
constexpr int kRounds = 3;
constexpr int64_t kTrialIterations = 3;
constexpr int64_t kMostIterations = 2000;
constexpr int kStartAfterMicroseconds = 100;

// At each of these sizes both ways are measured, at once and in chunks.
constexpr std::array<size_t, 5> kOneShot{4 * kKiB, 8 * kKiB, 16 * kKiB,
                                         32 * kKiB, 64 * kKiB};
constexpr std::array<size_t, 5> kChunks{64 * kKiB, 128 * kKiB, 256 * kKiB,
                                        512 * kKiB, 1024 * kKiB};
// Sizes that go through chunks.
constexpr std::array<size_t, 4> kStaged{256 * kKiB, 1024 * kKiB, 4096 * kKiB,
                                        16384 * kKiB};
// The lowest one_shot_bytes that is allowed: all sizes here then go through
// chunks.
constexpr size_t kNever = 64;
constexpr int kMeasurements =
    2 * kOneShot.size() + kChunks.size() * kStaged.size();

std::string in_kib(size_t bytes) { return std::to_string(bytes / kKiB) + "K"; }

json to_json(const Tuning& tuning) {
  return {{"one_shot_bytes", tuning.one_shot_bytes},
          {"chunk_bytes", tuning.chunk_bytes},
          {"streaming_bytes", tuning.streaming_bytes}};
}

// Finds the thresholds for one number of ranks.
class Search {
 public:
  Search(const Options& options, int ranks, double seconds,
         const StopSignal& stop)
      : ranks_(ranks),
        seconds_(seconds / kMeasurements / kRounds),
        side_(protocol_side(options)),
        world_(side_.name, side_.program, side_.launch, ranks, options.timeout,
               stop) {
    world_.await_ready();
  }

  Tuning best() {
    Tuning tuning = shm::default_tuning(ranks_);
    tuning.one_shot_bytes = best_one_shot(tuning);
    tuning.chunk_bytes = best_chunk(tuning);
    return tuning;
  }

  void finish() { world_.finish(); }

  // What was measured, a line for each size.
  const std::vector<std::string>& evidence() const { return evidence_; }

 private:
  // Measures the candidates in turns, so that a machine that is busy for a
  // while is so for all. Returns for each the median of its rounds, in
  // microseconds.
  std::vector<double> measure(const std::vector<Tuning>& candidates,
                              size_t bytes) {
    std::vector<std::vector<double>> rounds(candidates.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < candidates.size(); ++i) {
        rounds[i].push_back(time(candidates[i], bytes));
      }
    }
    std::vector<double> medians;
    for (auto& one : rounds) medians.push_back(median(std::move(one)));
    return medians;
  }

  double time(const Tuning& tuning, size_t bytes) {
    json request{
        {"operation", "all_reduce"},
        {"elements", bytes / sizeof(float)},
        {"dtype", "float32"},
        {"reduce_op", "sum"},
        {"async", false},
        {"check", false},
        {"warmup", 1},
        {"iterations", kTrialIterations},
        {"start_after_us", ranks_ <= cores() ? kStartAfterMicroseconds : 0},
        {"tuning", to_json(tuning)}};
    auto& guess = guesses_[bytes];
    if (guess == 0) guess = median_of(request);
    const double fit =
        seconds_ * 1e6 / (guess + request["start_after_us"].get<double>());
    request["iterations"] = static_cast<int64_t>(
        std::clamp(fit, static_cast<double>(kTrialIterations),
                   static_cast<double>(kMostIterations)));
    return median_of(request);
  }

  double median_of(const json& request) {
    std::vector<std::vector<int64_t>> by_rank;
    for (const auto& answer : world_.ask(request)) {
      by_rank.push_back(answer.at("ns").get<std::vector<int64_t>>());
    }
    return std::max(of_slowest_rank(by_rank).p50, 1e-3);
  }

  void note(size_t bytes, const std::vector<std::string>& names,
            const std::vector<double>& times) {
    std::string line = "#   " + in_kib(bytes) + ":";
    for (size_t i = 0; i < names.size(); ++i) {
      char text[32];
      std::snprintf(text, sizeof(text), " %.1f us", times[i]);
      line += (i == 0 ? " " : ", ") + names[i] + text;
    }
    evidence_.push_back(line);
  }

  // Finds the size from which on going through chunks pays: the threshold with
  // which all sizes together take the least time, each size counting the same.
  size_t best_one_shot(const Tuning& tuning) {
    Tuning staged = tuning;
    staged.one_shot_bytes = kNever;
    Tuning at_once = tuning;
    at_once.one_shot_bytes = kOneShot.back();
    double gained = 0;
    double most = 0;
    size_t best = kOneShot.front();
    for (const size_t bytes : kOneShot) {
      const auto times = measure({at_once, staged}, bytes);
      note(bytes, {"at once", "in chunks"}, times);
      gained += std::log(times[1] / times[0]);
      // The first size is a candidate, whatever it gains.
      if (bytes == kOneShot.front() || gained > most) {
        most = gained;
        best = bytes;
      }
    }
    return best;
  }

  size_t best_chunk(const Tuning& tuning) {
    std::vector<Tuning> candidates(kChunks.size(), tuning);
    for (size_t i = 0; i < kChunks.size(); ++i) {
      candidates[i].chunk_bytes = kChunks[i];
    }
    std::vector<std::string> names;
    for (const size_t chunk : kChunks) names.push_back(in_kib(chunk));
    std::vector<double> costs(kChunks.size(), 0);
    for (const size_t bytes : kStaged) {
      const auto times = measure(candidates, bytes);
      note(bytes, names, times);
      for (size_t i = 0; i < costs.size(); ++i) costs[i] += std::log(times[i]);
    }
    const auto least = std::ranges::min_element(costs);
    return kChunks[static_cast<size_t>(least - costs.begin())];
  }

  int ranks_;
  double seconds_;  // of one measurement
  Side side_;
  World world_;
  std::vector<std::string> evidence_;
  std::map<size_t, double> guesses_;  // microseconds, by bytes
};

std::vector<int> rank_counts(const Options& options) {
  std::vector<int> counts = options.ranks;
  if (counts.empty()) {
    for (int ranks = 2; ranks <= std::min(cores(), kMostRanks); ranks *= 2) {
      counts.push_back(ranks);
    }
    for (const int ranks : {cores(), 2 * cores(), 4 * cores()}) {
      if (ranks >= 2 && ranks <= kMostRanks) counts.push_back(ranks);
    }
  }
  std::ranges::sort(counts);
  const auto rest = std::ranges::unique(counts);
  counts.erase(rest.begin(), rest.end());
  if (counts.back() > kMostRanks) {
    throw std::invalid_argument("--ranks " + std::to_string(counts.back()) +
                                ": shared memory takes at most " +
                                std::to_string(kMostRanks) + " ranks");
  }
  return counts;
}

void print_heading(const std::vector<int>& counts) {
  const auto machine = machine_facts();
  std::printf("# %d cores, %s; load %.2f\n", machine.at("cores").get<int>(),
              machine.at("cpu").get<std::string>().c_str(),
              machine.at("load_before").get<double>());
  std::printf(
      "# thresholds of shared memory for %zu number%s of ranks; the "
      "library's own in brackets\n",
      counts.size(), counts.size() == 1 ? "" : "s");
  std::printf("%5s %22s %22s %22s\n", "ranks", "one_shot_bytes", "chunk_bytes",
              "streaming_bytes");
}

void print_row(int ranks, const Tuning& tuning) {
  const auto given = shm::default_tuning(ranks);
  std::printf("%5d", ranks);
  for (const auto& [value, before] :
       {std::pair(tuning.one_shot_bytes, given.one_shot_bytes),
        std::pair(tuning.chunk_bytes, given.chunk_bytes),
        std::pair(tuning.streaming_bytes, given.streaming_bytes)}) {
    std::printf(" %10zu [%9zu]", value, before);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

void tune(const Options& options, const StopSignal& stop) {
  const auto counts = rank_counts(options);
  const auto path = options.output.empty()
                        ? shm::tuning_file_path()
                        : std::filesystem::path(options.output);
  if (path.empty()) {
    throw std::invalid_argument(
        "neither LOCKSTEP_TUNING, XDG_CONFIG_HOME nor HOME is set; "
        "name the file with --output");
  }
  print_heading(counts);
  std::vector<shm::TuningTable> tables;
  for (const int ranks : counts) {
    Search search(options, ranks,
                  options.seconds / static_cast<double>(counts.size()), stop);
    tables.push_back({.ranks = ranks, .tuning = search.best()});
    search.finish();
    print_row(ranks, tables.back().tuning);
    for (const auto& line : search.evidence()) std::puts(line.c_str());
    std::fflush(stdout);
  }
  shm::write_tuning_file(path, tables);
  std::printf("# written to %s\n", path.c_str());
  if (path != shm::tuning_file_path()) {
    std::printf("# the library reads it if LOCKSTEP_TUNING names it\n");
  }
}

}  // namespace lockstep::bench
