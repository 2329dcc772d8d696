// FullyShard whose groups are made again in the midst of forwards and
// backwards. No process is new here: fsdp_reconfigure_death_test has those.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
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
// say, and returns this rank's result.
std::string trained(const InterruptedForm& form, const World& world, int steps,
                    const std::vector<Interruption>& interruptions) {
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
  at_moment = [&](int step, char moment) {
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

}  // namespace
}  // namespace lockstep::internal
