#include "tests/parallel/fuzz/campaign.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <set>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::fuzz {
namespace {

// After this time the reducer stops with what it has.
constexpr std::chrono::seconds kReductionTime{60};

// How often a feature was drawn, and the results of those cases.
struct Tally {
  int cases{0};
  int refused{0};
  int failed{0};
};

// Returns the kind of a failure: its reason without the numbers.
std::string kind_of(const Outcome& outcome) {
  if (outcome.verdict != Verdict::failed) return {};
  const auto& reason = outcome.reason;
  if (reason.find(" is off by ") != std::string::npos) return "a difference";
  if (reason.find("should not be") != std::string::npos) return "not undefined";
  if (reason.find(" is missing ") != std::string::npos) return "missing";
  const auto begin = reason.find(": ");
  const auto thrown = reason.find("): ");
  return reason.substr(thrown != std::string::npos ? thrown : begin, 25);
}

void print_reduced(const Subject& subject, FuzzWorld& world, uint64_t seed,
                   int world_size, const Outcome& outcome) {
  const auto kind = kind_of(outcome);
  auto last = outcome;
  int runs = 0;
  const auto deadline = Deadline::after(kReductionTime);
  const auto edits = subject.reduce(seed, world_size, [&](const Edits& tried) {
    if (deadline.expired()) return false;
    ++runs;
    const auto now = world.run(seed, tried);
    if (kind_of(now) != kind) return false;
    last = now;
    return true;
  });
  std::printf("smallest after %zu edits, %d runs: %s\n%s\n", edits.size(), runs,
              last.reason.c_str(),
              subject.program(seed, world_size, edits, last.reason).c_str());
}

bool is_wanted(const std::set<std::string>& features,
               const CampaignOptions& options) {
  auto is_there = [&](const std::string& text) {
    return std::ranges::any_of(features, [&](const std::string& feature) {
      return feature.find(text) != std::string::npos;
    });
  };
  return std::ranges::all_of(options.with, is_there) &&
         std::ranges::none_of(options.without, is_there);
}

void print_statistics(const std::map<std::string, Tally>& tallies, int cases) {
  std::printf("%-46s %8s %6s %8s %8s\n", "feature", "cases", "%", "refused",
              "failed");
  for (const auto& [name, tally] : tallies) {
    std::printf("%-46s %8d %6.1f %8d %8d\n", name.c_str(), tally.cases,
                100.0 * tally.cases / cases, tally.refused, tally.failed);
  }
}

}  // namespace

bool run_campaign(const Subject& subject, const CampaignOptions& options) {
  const int world_size = options.world.world_size;
  FuzzWorld world(options.world);
  std::map<std::string, Tally> tallies;
  Tally sum;
  std::map<std::string, int> refusals;
  // The time of the cases that passed, without starting the world.
  std::chrono::duration<double> time{};
  int timed = 0;
  for (uint64_t seed = options.begin; seed < options.end; ++seed) {
    const auto features = subject.features(seed, world_size);
    if (!is_wanted(features, options)) continue;
    const bool was_running = world.is_running();
    const auto begin = std::chrono::steady_clock::now();
    const auto outcome = world.run(seed, {});
    if (was_running && outcome.verdict == Verdict::passed) {
      time += std::chrono::steady_clock::now() - begin;
      ++timed;
    }
    const bool refused = outcome.verdict == Verdict::refused;
    const bool failed = outcome.verdict == Verdict::failed;
    auto count = [&](Tally& tally) {
      ++tally.cases;
      tally.refused += refused ? 1 : 0;
      tally.failed += failed ? 1 : 0;
    };
    count(sum);
    for (const auto& feature : features) count(tallies[feature]);
    if (refused) ++refusals[outcome.reason];
    if (!failed) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
                outcome.reason.c_str());
    if (options.prints_statistics) {
      std::printf(" ");
      for (const auto& feature : features) {
        std::printf(" [%s]", feature.c_str());
      }
      std::printf("\n");
    }
    if (options.prints_programs) {
      std::printf(
          "%s\n",
          subject.program(seed, world_size, {}, outcome.reason).c_str());
    }
    std::fflush(stdout);  // reducing takes long
    if (options.reduces)
      print_reduced(subject, world, seed, world_size, outcome);
    std::fflush(stdout);
  }
  if (options.prints_statistics) print_statistics(tallies, sum.cases);
  for (const auto& [reason, count] : refusals) {
    std::printf("refused %d: %s\n", count, reason.c_str());
  }
  std::printf(
      "%s, %d ranks, seeds %llu:%llu: %d cases, %d refused, %d failed, %.0f "
      "cases/s where they pass\n",
      options.world.backend.c_str(), world_size,
      static_cast<unsigned long long>(options.begin),
      static_cast<unsigned long long>(options.end), sum.cases, sum.refused,
      sum.failed, timed > 0 ? timed / time.count() : 0);
  return sum.failed == 0;
}

}  // namespace lockstep::internal::fuzz
