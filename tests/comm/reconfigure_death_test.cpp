// Ranks that die, and new processes that take their places.
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

using ::testing::HasSubstr;

// A job of ranks that the test starts, kills and replaces.
class ReplacedRanks : public ProgramTest,
                      public ::testing::WithParamInterface<const char*> {
 protected:
  void start(int rank, int size, int generation = 0,
             const std::string& argument = {}) {
    std::vector<std::string> command{
        LOCKSTEP_BIN_DIR "/tests/comm_reconfigure_rank", GetParam(),
        std::to_string(rank), std::to_string(size), store().string()};
    if (!argument.empty()) command.push_back(argument);
    ProgramSetup setup{.environment = {"OMP_NUM_THREADS=1", "LOCKSTEP_HEAL=1"}};
    if (generation > 0) {
      setup.environment.push_back("LOCKSTEP_GENERATION=" +
                                  std::to_string(generation));
    }
    ranks_[rank] = start_program(command, std::move(setup));
  }

  // Starts all ranks and waits until they compute.
  void start_all(int size) {
    for (int rank = 0; rank < size; ++rank) start(rank, size);
    for (auto& [rank, program] : ranks_) program->await_output("ready");
  }

  void kill(int rank) {
    ranks_[rank]->signal(SIGKILL);
    ranks_[rank]->finish();
    ranks_.erase(rank);
  }

  void announce(int generation) {
    const auto name = store().string() + ".generation";
    std::ofstream(name + ".new") << generation;
    std::filesystem::rename(name + ".new", name);
  }

  void await(const std::string& word) {
    for (auto& [rank, program] : ranks_) program->await_output(word);
  }

  void end_well() {
    std::ofstream(store().string() + ".end") << "1";
    for (auto& [rank, program] : ranks_) {
      const auto result = program->finish();
      EXPECT_EQ(result.exit_code, 0) << rank << ": " << result.err;
    }
  }

  std::filesystem::path store() const { return scratch() / "store"; }

  std::map<int, std::unique_ptr<RunningProgram>> ranks_;
};

TEST_P(ReplacedRanks, ComputeWithTheOthers) {
  start_all(3);
  int generation = 0;
  for (const int victim : {1, 0, 2}) {
    kill(victim);
    announce(++generation);
    start(victim, 3, generation);
    for (auto& [rank, program] : ranks_) {
      program->await_output("healed " + std::to_string(rank) + " " +
                            std::to_string(generation));
    }
  }
  end_well();
}

// The process that takes the place dies in the midst of joining, at each of its
// first calls of the store. At its last reads, Gloo has told the others where
// to connect, and may never connect to them.
TEST_P(ReplacedRanks, MayDieWhileTheyJoin) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    std::filesystem::remove(store());
    announce(0);
    ranks_.clear();
    start_all(2);
    kill(victim);
    int generation = 0;
    for (const std::string call : {"dies=", "reads="}) {
      for (int number = 1; number <= 4; ++number) {
        announce(++generation);
        start(victim, 2, generation, call + std::to_string(number));
        EXPECT_EQ(ranks_[victim]->finish().exit_code, 128 + SIGKILL);
        ranks_.erase(victim);
      }
    }
    announce(++generation);
    start(victim, 2, generation);
    for (auto& [rank, program] : ranks_) {
      program->await_output("healed " + std::to_string(rank) + " " +
                            std::to_string(generation));
    }
    end_well();
    std::filesystem::remove(store().string() + ".end");
  }
}

// Nobody comes for the first generation, so the others must learn of the next.
TEST_P(ReplacedRanks, AreNotWaitedForOnceThereIsANewerGeneration) {
  start_all(2);
  kill(0);
  announce(1);
  await("failed");
  announce(2);
  start(0, 2, 2);
  await("healed");
  end_well();
}

TEST_P(ReplacedRanks, MustMakeTheSameGroups) {
  start_all(3);
  kill(2);
  announce(1);
  start(2, 3, 1, "other");
  for (auto& [rank, program] : ranks_) {
    if (rank == 1) continue;
    program->await_output("refused");
    EXPECT_THAT(program->finish().out, HasSubstr("have made different groups"));
  }
}

INSTANTIATE_TEST_SUITE_P(, ReplacedRanks,
                         ::testing::Values("gloo", "shm", "lockstep"));

}  // namespace
}  // namespace lockstep::internal::testing
