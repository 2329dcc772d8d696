// `lockstep bench`: starts ranks of ours and of peers, and times them in turns.
// The ranks are programs of their own (rank/, lockstep-bench-python.py); this
// one does not link LibTorch, so that it reports a mistyped option at once.

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/report.h"
#include "lockstep/cli/bench/sides.h"
#include "lockstep/cli/bench/world.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/machine.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal::bench {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Iterations of the trial that finds how many fit into --seconds.
constexpr int64_t kTrialIterations = 3;
constexpr int64_t kLeastIterations = 5;
constexpr int64_t kMostIterations = 10'000;
// If each rank has a core, the ranks agree on a moment to begin. It is this
// long after the last of them has come: enough for the agreement to reach the
// others.
constexpr int kStartAfterMicroseconds = 100;

// The worlds of all sides for one number of ranks, and the loop over what they
// measure.
class WorldSession {
 public:
  WorldSession(const Options& options, const std::vector<Side>& sides,
               int ranks, const StopSignal& stop)
      : options_(options), ranks_(ranks) {
    for (const auto& side : sides) {
      worlds_.push_back(std::make_unique<World>(
          side.name, side.program, side.launch, ranks, options.timeout, stop));
    }
    // This is not in the loop above, so that the worlds start side by side.
    for (const auto& world : worlds_) await_ready(*world);
  }

  // Returns what each side says of itself.
  ordered_json facts() const {
    ordered_json facts;
    for (const auto& world : worlds_) {
      json one = world->facts();
      for (const char* key : {"id", "rank"}) one.erase(key);
      facts[world->name()] = one;
    }
    return facts;
  }

  std::vector<Figures> measure(const Configuration& configuration) {
    std::vector<Figures> figures;
    std::vector<json> requests;
    for (size_t i = 0; i < worlds_.size(); ++i) {
      figures.push_back({.side = worlds_[i]->name()});
      requests.push_back(try_out(*worlds_[i], configuration, figures.back()));
    }
    // The sides take turns, so that a machine that is busy for a while is so
    // for all.
    for (int round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < worlds_.size(); ++i) {
        if (requests[i].is_null()) continue;
        figures[i].rounds.push_back(times(worlds_[i]->ask(requests[i])));
      }
    }
    return figures;
  }

  void finish() {
    for (size_t i = 0; i < worlds_.size(); ++i) {
      try {
        worlds_[i]->finish();
      } catch (const WorldError&) {
        // Python's Gloo aborts now and then when its processes end (torch
        // 2.13), after all its work.
        if (i == 0) throw;
      }
    }
  }

 private:
  static void await_ready(World& world) {
    try {
      world.await_ready();
    } catch (const Refusal& refusal) {
      const std::string text = world.name() + ": " + refusal.what();
      if (refusal.is_users_mistake()) throw std::invalid_argument(text);
      throw WorldError(text);
    }
  }

  static Latencies times(const std::vector<json>& answers) {
    std::vector<std::vector<int64_t>> by_rank;
    for (const auto& answer : answers) {
      by_rank.push_back(answer.at("ns").get<std::vector<int64_t>>());
    }
    return of_slowest_rank(by_rank);
  }

  json request_for(const Configuration& configuration) const {
    return {
        {"operation", configuration.operation.name},
        {"elements", configuration.elements},
        {"dtype", configuration.dtype.name},
        {"reduce_op", options_.reduce_op},
        {"async", options_.async_op},
        {"check", false},
        {"warmup", options_.warmup},
        {"iterations", 0},
        {"start_after_us", ranks_ <= cores() ? kStartAfterMicroseconds : 0}};
  }

  // Checks the results, once, and finds how long an iteration takes. Returns
  // the request for a round; null if a peer cannot do it.
  json try_out(World& world, const Configuration& configuration,
               Figures& figures) {
    json request = request_for(configuration);
    request["check"] = true;
    request["iterations"] = kTrialIterations;
    std::vector<json> answers;
    try {
      answers = world.ask(request);
    } catch (const Refusal& refusal) {
      const std::string text =
          world.name() + ": " + describe(configuration) + ": " + refusal.what();
      if (&world != worlds_.front().get()) {
        figures.error = refusal.what();
        write_message(kName, text);
        return nullptr;
      }
      if (refusal.is_users_mistake()) throw std::invalid_argument(text);
      throw WorldError(text);
    }
    count_wrong(world, configuration, answers, figures);
    request["check"] = false;
    request["iterations"] = options_.iterations.value_or(
        iterations_for(times(answers).p50, options_.seconds));
    return request;
  }

  static int64_t iterations_for(double microseconds, double seconds) {
    const double fit = seconds * 1e6 / std::max(microseconds, 1e-3);
    return static_cast<int64_t>(
        std::clamp(fit, static_cast<double>(kLeastIterations),
                   static_cast<double>(kMostIterations)));
  }

  static void count_wrong(const World& world,
                          const Configuration& configuration,
                          const std::vector<json>& answers, Figures& figures) {
    for (size_t rank = 0; rank < answers.size(); ++rank) {
      const int64_t wrong = answers[rank].at("wrong");
      if (wrong == 0) continue;
      figures.wrong += wrong;
      write_message(kName, world.name() + ": " + describe(configuration) +
                               ": rank " + std::to_string(rank) + " has " +
                               std::to_string(wrong) + " wrong elements; " +
                               answers[rank].value("first_wrong", ""));
    }
  }

  static std::string describe(const Configuration& configuration) {
    std::string text(configuration.operation.name);
    if (configuration.elements > 0) {
      text += " of " + std::to_string(configuration.elements) + " " +
              std::string(configuration.dtype.name);
    }
    return text + " over " + std::to_string(configuration.ranks) + " ranks";
  }

  const Options& options_;
  int ranks_;
  std::vector<std::unique_ptr<World>> worlds_;
};

// Returns the number of elements of S for each size that was asked for, each
// number once.
std::vector<int64_t> element_counts(const Options& options,
                                    const Operation& operation,
                                    const DType& dtype, int ranks) {
  std::vector<int64_t> counts;
  for (const int64_t bytes : options.sizes) {
    const int64_t count = element_count(operation, dtype, bytes, ranks);
    if (std::ranges::find(counts, count) == counts.end()) {
      counts.push_back(count);
    }
  }
  return counts;
}

struct Block {
  Operation operation;
  DType dtype;
};

std::vector<Block> blocks(const Options& options) {
  std::vector<Block> all;
  for (const auto& operation : options.operations) {
    for (const auto& dtype : options.dtypes) {
      all.push_back({operation, dtype});
      // Without data, one dtype is as good as another.
      if (operation.volume == Volume::none) break;
    }
  }
  return all;
}

// Writes the text into the file of --json, or adds nothing to it, before
// minutes are spent on figures that could not be written.
void write(const std::string& path, const std::string& text,
           std::ios::openmode mode) {
  std::ofstream file(path, mode);
  file << text;
  file.close();
  if (!file) {
    throw std::invalid_argument("cannot write --json " + path + ": " +
                                std::strerror(errno));
  }
}

// Runs the whole benchmark: prints the table, writes the JSON. Returns false if
// an element of a result was wrong (each such measurement is named on stderr).
// Throws std::invalid_argument for what the user can correct, WorldError,
// Interrupted. No process is left, whatever is thrown.
bool run(const Options& options, const StopSignal& stop) {
  const auto begin = std::chrono::steady_clock::now();
  const bool has_file = !options.json.empty() && options.json != "-";
  if (has_file) write(options.json, "", std::ios::app);
  std::vector<std::string> left_out;
  const std::vector<Side> all_sides = sides(options, left_out);
  for (const auto& line : left_out) write_message(kName, line);
  std::vector<std::string> peers;
  for (size_t i = 1; i < all_sides.size(); ++i) {
    peers.push_back(all_sides[i].name);
  }
  // If JSON goes to stdout, for a program, the table goes to stderr, for
  // people.
  Table table(options.json == "-" ? stderr : stdout, options, peers);
  ordered_json machine = machine_facts();
  ordered_json facts;
  ordered_json results = ordered_json::array();
  bool right = true;
  const Competitors competitors(options.competing);
  for (const int ranks : options.ranks) {
    WorldSession session(options, all_sides, ranks, stop);
    if (facts.is_null()) {
      facts = session.facts();
      machine["torch"] = facts.at("lockstep").at("torch");
      table.add_machine(machine);
    }
    for (const auto& [operation, dtype] : blocks(options)) {
      Configuration configuration{operation, dtype, ranks, 0};
      table.add_heading(configuration);
      for (const int64_t count :
           element_counts(options, operation, dtype, ranks)) {
        configuration.elements = count;
        const auto figures = session.measure(configuration);
        table.add_row(configuration, figures);
        for (auto& entry : to_json(configuration, options, figures)) {
          results.push_back(std::move(entry));
        }
        for (const auto& one : figures) right &= one.wrong == 0;
      }
      table.add_comparison();
    }
    session.finish();
  }
  if (!options.json.empty()) {
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    const std::string text =
        document(options, machine, facts, results, took.count())
            .dump(1, ' ', false, ordered_json::error_handler_t::replace) +
        '\n';
    if (has_file) {
      write(options.json, text, std::ios::out);
    } else {
      std::cout << text << std::flush;
    }
  }
  return right;
}

}  // namespace
}  // namespace lockstep::internal::bench

int main(int argc, char** argv) {
  using namespace lockstep::internal::bench;
  using lockstep::internal::Interrupted, lockstep::internal::StopSignal;
  using lockstep::internal::kSystemError, lockstep::internal::kUsageError;
  try {
    const auto options = parse_options(argc, argv);
    if (!options) return lockstep::internal::end_output(kName, 0);
    // A rank that has died is noticed by its exit, not by a write to it.
    signal(SIGPIPE, SIG_IGN);
    const StopSignal stop;
    if (run(*options, stop)) {
      return lockstep::internal::end_output(kName, 0);
    }
    lockstep::internal::write_message(kName, "results were wrong; see above");
    return kSystemError;
  } catch (const Interrupted& interrupted) {
    return 128 + interrupted.signal();
  } catch (const std::invalid_argument& error) {
    lockstep::internal::write_message(kName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    lockstep::internal::write_message(kName, error.what());
    return kSystemError;
  }
}
