// Ranks of a training with FullyShard that are killed, and new processes that
// take their places: the training ends with the bits of one in which no rank
// died.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kEndsWithin{90};

class ShardedRanks : public ProgramTest {
 protected:
  // Trains in `form`, while ranks kill themselves as `deaths` says
  // (reconfigure_rank.cpp). Returns what each rank wrote at the end.
  std::vector<std::string> train(const std::string& form, int size,
                                 const std::string& deaths) {
    const auto folder = scratch() / (form + deaths);
    fs::create_directories(folder);
    std::map<int, std::unique_ptr<RunningProgram>> ranks;
    const auto start = [&](int rank, int generation) {
      ranks[rank] = start_program(
          {LOCKSTEP_BIN_DIR "/tests/fsdp_reconfigure_rank", form,
           std::to_string(rank), std::to_string(size), folder.string(), deaths},
          {.environment = {
               "OMP_NUM_THREADS=1", "LOCKSTEP_HEAL=1",
               "LOCKSTEP_PLACED_BYTES=400",
               "LOCKSTEP_GENERATION=" + std::to_string(generation)}});
    };
    for (int rank = 0; rank < size; ++rank) start(rank, 0);
    int generation = 0;
    for (size_t at = 2; at < deaths.size(); at += 4) {
      const int victim = deaths[at] - '0';
      const auto died = ranks[victim]->finish(kEndsWithin);
      EXPECT_EQ(died.exit_code, 128 + SIGKILL) << died.err;
      ++generation;
      std::ofstream(folder / "new") << generation;
      fs::rename(folder / "new", folder / "generation");
      start(victim, generation);
    }
    std::vector<std::string> results;
    for (auto& [rank, program] : ranks) {
      const auto ended = program->finish(kEndsWithin);
      EXPECT_EQ(ended.exit_code, 0) << "rank " << rank << ": " << ended.err;
      results.push_back(read_file(folder / ("result." + std::to_string(rank))));
      EXPECT_FALSE(results.back().empty());
    }
    return results;
  }

  void expect_same_bits(const std::string& form, int size,
                        const std::string& deaths) {
    const auto undisturbed = train(form, size, "-");
    EXPECT_TRUE(train(form, size, deaths) == undisturbed);
  }
};

TEST_F(ShardedRanks, ShareOneCopy) {
  expect_same_bits("common", 2, "2f1,3b0,4s1");
}

TEST_F(ShardedRanks, Gather) { expect_same_bits("gathered", 3, "2f1,3b0,4s2"); }

TEST_F(ShardedRanks, GatherFromNeighbours) {
  expect_same_bits("neighbours", 4, "2b3,3f0");
}

TEST_F(ShardedRanks, AreReplicasOfOthers) {
  expect_same_bits("replicas", 4, "2f3,3b0,4s1");
}

}  // namespace
}  // namespace lockstep::internal::testing
