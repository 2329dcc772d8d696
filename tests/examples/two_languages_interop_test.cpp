// Python and C++ ranks train together: under torchrun and under `lockstep run`,
// in one group, through a crash and a restart; and one language continues from
// the other's snapshot. The training is that of interop_trainer.py and .cpp.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kEpochs = 6;
// How far sums in another order may differ in double precision, with momentum,
// after 48 steps. (Today nothing differs: both languages compute the same
// bits.)
constexpr double kBound = 1e-12;

class TwoLanguages : public ExampleTest {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
    }
  }

  static std::vector<std::string> torchrun() {
    return {LOCKSTEP_TORCH_PYTHON,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--no-python"};
  }
  static std::vector<std::string> lockstep_run() {
    return {LOCKSTEP_BIN_DIR "/lockstep",
            "run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--no-python"};
  }

  // Trains to `epochs` with the ranks in `python_ranks` ("0", "1", "01") in
  // Python, the others in C++.
  ProgramResult train(std::vector<std::string> launcher,
                      const std::string& python_ranks, int epochs,
                      std::vector<std::string> variables = {}) {
    // Python's torch leaves folders behind; here they are removed with the
    // test.
    const std::string script =
        "export TMPDIR=\"$PWD\"\n"
        "case \"$PYTHON_RANKS\" in\n"
        "*$RANK*) exec " LOCKSTEP_TORCH_PYTHON " " LOCKSTEP_SOURCE_DIR
        "/tests/examples/interop_trainer.py \"$@\" ;;\n"
        "*) exec " LOCKSTEP_BIN_DIR
        "/tests/interop_trainer \"$@\" ;;\n"
        "esac";
    for (const std::string& argument :
         {std::string("sh"), std::string("-c"), script, std::string("sh"),
          std::to_string(epochs), std::string("snapshot.pt")}) {
      launcher.push_back(argument);
    }
    for (const std::string& variable :
         {"PYTHON_RANKS=" + python_ranks, std::string("OMP_NUM_THREADS=1"),
          std::string("CUDA_VISIBLE_DEVICES="),
          // Otherwise Python looks up the host's name, which takes seconds on
          // some hosts.
          std::string("GLOO_SOCKET_IFNAME=lo"),
          "TMPDIR=" + scratch().string()}) {
      variables.push_back(variable);
    }
    auto result = run_program(
        launcher, {.environment = std::move(variables), .folder = scratch()},
        kAllowed);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  }

  // Returns the final parameters, after checking that all ranks have the same.
  std::vector<double> take_parameters() {
    auto bytes = read_file(scratch() / "final-0.bin");
    EXPECT_FALSE(bytes.empty());
    EXPECT_TRUE(bytes == read_file(scratch() / "final-1.bin"))
        << "the ranks have different parameters";
    std::vector<double> numbers(bytes.size() / sizeof(double));
    std::memcpy(numbers.data(), bytes.data(), bytes.size());
    for (const char* file : {"final-0.bin", "final-1.bin", "snapshot.pt"}) {
      std::filesystem::remove(scratch() / file);
    }
    return numbers;
  }

  // Returns the parameters of a training by C++ ranks alone, without a crash;
  // it runs once for all tests.
  const std::vector<double>& uninterrupted() {
    static std::vector<double> parameters;
    if (parameters.empty()) {
      train(lockstep_run(), "none", kEpochs);
      parameters = take_parameters();
    }
    return parameters;
  }

  static void expect_near(const std::vector<double>& have,
                          const std::vector<double>& want) {
    ASSERT_EQ(have.size(), want.size());
    double worst = 0;
    for (size_t i = 0; i < have.size(); ++i) {
      worst = std::max(worst, std::abs(have[i] - want[i]));
    }
    EXPECT_LE(worst, kBound);
  }

  // Expects that both ranks began twice, the second time at the snapshot's
  // epoch.
  static void expect_restarted(const ProgramResult& result,
                               const std::string& rank_zero,
                               const std::string& rank_one) {
    for (const auto& rank : {rank_zero + " rank 0", rank_one + " rank 1"}) {
      EXPECT_EQ(count(result.out, rank + " begins at epoch 0, restart 0\n"), 1)
          << result.out;
      // The crash is at the beginning of epoch 3, when rank 0 may not have
      // saved epoch 2 yet.
      EXPECT_EQ(count(result.out, rank + " begins at epoch 2, restart 1\n") +
                    count(result.out, rank + " begins at epoch 3, restart 1\n"),
                1)
          << result.out;
    }
  }
};

const std::vector<std::string> kCrashOfRankOne{"CRASH_RANK=1", "CRASH_EPOCH=3"};

// torch 2.13's agent keeps one store for the workers of all restarts. Python
// ranks then find the addresses of dead ranks there, whether or not C++ ranks
// are among them. This variable makes the agent leave the store to rank 0,
// which makes a new one each time.
std::vector<std::string> crash_and_fresh_store() {
  auto variables = kCrashOfRankOne;
  variables.push_back("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1");
  return variables;
}

TEST_F(TwoLanguages, TrainUnderTorchrunInItsStore) {
  const auto& want = uninterrupted();
  auto result = train(torchrun(), "1", kEpochs);
  EXPECT_THAT(result.out, HasSubstr("cpp rank 0 begins at epoch 0"));
  EXPECT_THAT(result.out, HasSubstr("python rank 1 begins at epoch 0"));
  expect_near(take_parameters(), want);
}

TEST_F(TwoLanguages, AreRestartedByTorchrunWherePythonIsRankZero) {
  const auto& want = uninterrupted();
  auto result = train(torchrun(), "0", kEpochs, crash_and_fresh_store());
  expect_restarted(result, "python", "cpp");
  expect_near(take_parameters(), want);
}

TEST_F(TwoLanguages, AreRestartedByTorchrunWherePythonCrashes) {
  const auto& want = uninterrupted();
  auto result = train(torchrun(), "1", kEpochs, crash_and_fresh_store());
  expect_restarted(result, "cpp", "python");
  expect_near(take_parameters(), want);
}

// Our ranks restart in the store of the first attempt; Python's could not.
TEST_F(TwoLanguages, OursAloneAreRestartedByTorchrunInTheSameStore) {
  const auto& want = uninterrupted();
  auto result = train(torchrun(), "none", kEpochs, kCrashOfRankOne);
  expect_restarted(result, "cpp", "cpp");
  expect_near(take_parameters(), want);
}

TEST_F(TwoLanguages, AreRestartedByOurLauncher) {
  const auto& want = uninterrupted();
  auto result = train(lockstep_run(), "0", kEpochs, kCrashOfRankOne);
  expect_restarted(result, "python", "cpp");
  expect_near(take_parameters(), want);
}

TEST_F(TwoLanguages, PythonAloneIsRestartedByOurLauncher) {
  const auto& want = uninterrupted();
  auto result = train(lockstep_run(), "01", kEpochs, kCrashOfRankOne);
  expect_restarted(result, "python", "python");
  expect_near(take_parameters(), want);
}

TEST_F(TwoLanguages, EachGoesOnFromTheOthersSnapshot) {
  const auto& want = uninterrupted();
  for (auto [first, second, name] :
       {std::tuple("none", "01", "python"), std::tuple("01", "none", "cpp")}) {
    train(lockstep_run(), first, kEpochs / 2);
    auto result = train(lockstep_run(), second, kEpochs);
    for (const char* rank : {"0", "1"}) {
      EXPECT_THAT(result.out, HasSubstr(std::string(name) + " rank " + rank +
                                        " begins at epoch 3, restart 0\n"));
    }
    expect_near(take_parameters(), want);
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
