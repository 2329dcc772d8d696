// FullyShard whose groups are made again in the midst of forwards and
// backwards. No process is new here: fsdp_reconfigure_death_test has those.
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/worker/healing_place.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/interrupted_training.h"

namespace lockstep::internal {
namespace {

using namespace testing;

class JobThatHeals {
 public:
  JobThatHeals() { ::setenv(kHealVariable, "1", 1); }
  ~JobThatHeals() {
    ::unsetenv(kHealVariable);
    ::unsetenv("LOCKSTEP_HOST_ID");
  }
  JobThatHeals(const JobThatHeals&) = delete;
  JobThatHeals& operator=(const JobThatHeals&) = delete;
};

struct RankFails : std::exception {};

// Trains for `steps`, while one rank after the other fails as `interruptions`
// say, and returns this rank's result. `resumed(n)` is called when the groups
// were made again for the nth time, and a step was made since.
std::string trained(const InterruptedForm& form, const World& world, int steps,
                    const std::vector<Interruption>& interruptions,
                    const std::function<void(size_t)>& resumed = {}) {
  static int trainings = 0;
  const auto folder = world.folder / ("training" + std::to_string(trainings++));
  std::filesystem::create_directories(folder);
  take_host(form, world.rank, world.size);
  auto group = init_process_group(
      form.backend, {.world_size = world.size,
                     .rank = world.rank,
                     .store = c10::make_intrusive<c10d::FileStore>(
                         (folder / "store").string(), world.size)});
  size_t failures = 0;
  size_t seen = 0;
  at_moment = [&](int step, char moment) {
    if (moment == 's' && seen != failures) {
      seen = failures;
      if (resumed) resumed(seen);
    }
    if (failures == interruptions.size()) return;
    const auto& next = interruptions[failures];
    if (next.rank == world.rank && next.step == step && next.moment == moment) {
      throw RankFails();
    }
  };
  InterruptedTraining training(form, folder / "records");
  while (true) {
    try {
      training.run(steps);
      break;
    } catch (const std::exception&) {
      ++failures;
      reconfigure({.uuid = std::to_string(failures)});
      training.resume();
    }
  }
  EXPECT_EQ(failures, interruptions.size());
  return training.result();
}

void expect_same_bits(const char* form_name, const World& world) {
  SCOPED_TRACE(form_name);
  const JobThatHeals job;
  const auto& form = interrupted_forms().at(form_name);
  const int last = world.size - 1;
  const auto plain = trained(form, world, 6, {});
  const auto repeated = trained(
      form, world, 6, {{2, 'f', 0}, {2, 'b', last}, {3, 's', 0}, {4, 'b', 0}});
  EXPECT_TRUE(plain == repeated);
}

WORLD_TEST(FsdpReconfigure, GoesOnWithTheSameBits, 1, 2, 3) {
  for (const char* form : {"common", "common-low", "gathered", "gloo"}) {
    expect_same_bits(form, world);
  }
}

WORLD_TEST(FsdpReconfigure, InEveryDivision, 4) {
  for (const char* form : {"kept", "neighbours", "replicas", "hosts"}) {
    expect_same_bits(form, world);
  }
}

// Counts what this process has from the system, and memory of malloc().
struct FsdpHeld {
  int descriptors = 0;
  int mappings = 0;  // shared with other processes
  uint64_t mapped = 0;
  size_t allocated = 0;

  FsdpHeld() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    descriptors = static_cast<int>(std::distance(begin(all), end(all)));
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("rw-s") == line.npos) continue;
      ++mappings;
      const auto dash = line.find('-');
      mapped += std::stoull(line.substr(dash + 1), nullptr, 16) -
                std::stoull(line.substr(0, dash), nullptr, 16);
    }
    const auto heap = ::mallinfo2();
    allocated = heap.uordblks + heap.hblkhd;
  }
};

WORLD_TEST(FsdpReconfigure, NothingOfOldGenerationsStays, 2) {
  const JobThatHeals job;
  std::vector<Interruption> interruptions;
  for (int step = 2; step < 14; ++step) {
    interruptions.push_back({step, step % 2 == 0 ? 'f' : 'b', 0});
  }
  for (const char* name : {"common", "gathered", "gloo"}) {
    SCOPED_TRACE(name);
    auto form = interrupted_forms().at(name);
    form.width = 64;  // 200 KiB for a unit
    std::vector<FsdpHeld> held;
    trained(form, world, 15, interruptions,
            [&](size_t) { held.emplace_back(); });
    ASSERT_EQ(held.size(), interruptions.size());
    EXPECT_EQ(held.back().mappings, held[1].mappings);
    EXPECT_EQ(held.back().mapped, held[1].mapped);
    EXPECT_LE(held.back().descriptors, held[1].descriptors + 1);
    EXPECT_LE(held.back().allocated, held[1].allocated + (256 << 10));
  }
}

}  // namespace
}  // namespace lockstep::internal
