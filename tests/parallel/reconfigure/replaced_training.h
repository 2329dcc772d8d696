#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// A training (training.h) whose ranks die and are replaced by new processes. At
// its end each rank must have, bit by bit, what it has after the same training
// without a death.
class ReplacedTraining : public ProgramTest {
 protected:
  struct Death {
    int rank;
    std::string at;  // "2:forward": step and moment
  };

  // Each dies in the generation that the death before has begun.
  void train(const std::string& training, int size,
             const std::vector<Death>& deaths) {
    SCOPED_TRACE(training + " over " + std::to_string(size));
    std::string plan;
    for (const Death& death : deaths) {
      plan += std::to_string(death.rank) + "@" + death.at + ",";
    }
    start_all(training, size, plan);
    for (size_t i = 0; i < deaths.size(); ++i) {
      const int rank = deaths[i].rank;
      const auto killed = ranks_.at(rank)->finish(kAllowed);
      ASSERT_EQ(killed.exit_code, 128 + SIGKILL)
          << "rank " << rank << " at " << deaths[i].at << ": " << killed.out
          << killed.err;
      const int generation = static_cast<int>(i) + 1;
      announce(generation);
      start(training, rank, size, plan, generation);
    }
    finish("equal");
  }

  // Ten generations without a death leave what one leaves.
  void leave_nothing(const std::string& training, int size) {
    SCOPED_TRACE(training + " over " + std::to_string(size));
    start_all(training, size, "again=10");
    finish("holds no more\nequal");
  }

 private:
  static constexpr std::chrono::seconds kAllowed{90};

  std::filesystem::path folder() const {
    return scratch() / std::to_string(trained_);
  }

  void start_all(const std::string& training, int size,
                 const std::string& plan) {
    ++trained_;
    std::filesystem::create_directory(folder());
    ranks_.clear();
    for (int rank = 0; rank < size; ++rank) {
      start(training, rank, size, plan, /*generation=*/0);
    }
  }

  void start(const std::string& training, int rank, int size,
             const std::string& plan, int generation) {
    ProgramSetup setup{.environment = {"OMP_NUM_THREADS=1", "LOCKSTEP_HEAL=1"}};
    if (generation > 0) {
      setup.environment.push_back("LOCKSTEP_GENERATION=" +
                                  std::to_string(generation));
    }
    ranks_[rank] = start_program(
        {LOCKSTEP_BIN_DIR "/tests/parallel_reconfigure_rank", training,
         std::to_string(rank), std::to_string(size), folder().string(), plan},
        std::move(setup));
  }

  void announce(int generation) {
    const auto name = folder() / "generation";
    std::ofstream(name.string() + ".new") << generation;
    std::filesystem::rename(name.string() + ".new", name);
  }

  void finish(const std::string& words) {
    for (auto& [rank, program] : ranks_) {
      const auto result = program->finish(kAllowed);
      EXPECT_EQ(result.exit_code, 0) << "rank " << rank;
      EXPECT_NE(result.out.find(words), std::string::npos)
          << "rank " << rank << ": " << result.out << result.err;
    }
  }

  std::map<int, std::unique_ptr<RunningProgram>> ranks_;
  int trained_ = 0;
};

}  // namespace lockstep::internal::testing
