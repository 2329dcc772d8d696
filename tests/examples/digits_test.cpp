// Runs the demo program: the same training on any number of ranks, through
// kills and restarts, and its errors for mistakes.

#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/checkpoint/snapshot.h"
#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

double worst_difference(const Snapshot& one, const Snapshot& other) {
  double worst = 0;
  EXPECT_EQ(one.model_state.size(), other.model_state.size());
  for (size_t i = 0; i < one.model_state.size(); ++i) {
    const auto& [name, tensor] = one.model_state[i];
    EXPECT_EQ(name, other.model_state.at(i).first);
    auto difference = tensor - other.model_state.at(i).second;
    worst = std::max(worst, difference.abs().max().item<double>());
  }
  return worst;
}

void expect_same_bits(const Snapshot& one, const Snapshot& other) {
  ASSERT_EQ(one.model_state.size(), other.model_state.size());
  for (size_t i = 0; i < one.model_state.size(); ++i) {
    EXPECT_TRUE(one.model_state[i].second.equal(other.model_state[i].second))
        << one.model_state[i].first;
  }
  EXPECT_EQ(one.step, other.step);
  EXPECT_EQ(one.epochs_run, other.epochs_run);
}

class DigitsTest : public ExampleTest {
 protected:
  std::string path(const std::string& name) const {
    return (scratch() / name).string();
  }
  nlohmann::json report(const std::string& name) const {
    return nlohmann::json::parse(read_file(path(name)));
  }

  // Runs a whole training, which writes `name`.safetensors and `name`.json.
  void train(const std::string& name, int ranks,
             std::vector<std::string> options) {
    options.insert(options.begin(), "digits");
    for (const std::string& option :
         {std::string("--snapshot"), path(name + ".safetensors"),
          std::string("--report"), path(name + ".json")}) {
      options.push_back(option);
    }
    auto result = ranks == 1 ? run_alone(options) : run_ranks({ranks}, options);
    ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    ASSERT_EQ(report(name + ".json")["ranks"], ranks);
  }
  Snapshot snapshot(const std::string& name) const {
    return load_snapshot_file(path(name + ".safetensors"));
  }
  std::vector<double> losses(const std::string& name) const {
    return report(name + ".json")["losses"];
  }

  // Waits until the file's bytes differ from `before` ("" if there was no
  // file).
  bool await_change(const std::string& file, const std::string& before) {
    const Deadline deadline = Deadline::after(milliseconds(40'000));
    while (!fs::exists(path(file)) || read_file(path(file)) == before) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return true;
  }
};

double worst_difference(const std::vector<double>& one,
                        const std::vector<double>& other) {
  EXPECT_EQ(one.size(), other.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(one.size(), other.size()); ++i) {
    worst = std::max(worst, std::abs(one[i] - other[i]));
  }
  return worst;
}

// Splitting a batch changes the order of its sums, so gradients differ by
// rounding, here 1e-17. Adam divides by sqrt(v) + 1e-8: weights of a unit whose
// gradient is far below 1e-8 may move by lr * 1e-17 / 1e-8 = 2e-12 in a step,
// 5e-11 in the 22 steps. Measured: parameters 8e-15, losses 9e-16.
constexpr double kDoubleBound = 1e-10;
// In float32 that noise is as large as Adam's 1e-8: single weights may move
// freely, but the network's losses may not. Measured: 3e-4.
constexpr double kFloatLossBound = 1e-3;

TEST_F(DigitsTest, ParallelEqualsSingleInFloat64) {
  const std::vector<std::string> options{"--dtype", "float64",      "--epochs",
                                         "2",       "--batch-size", "128"};
  ASSERT_NO_FATAL_FAILURE(train("alone", 1, options));
  EXPECT_EQ(losses("alone").size(), 2u);
  EXPECT_LT(losses("alone")[1], losses("alone")[0]);
  for (int ranks : {2, 4}) {
    const std::string name = std::to_string(ranks) + "ranks";
    ASSERT_NO_FATAL_FAILURE(train(name, ranks, options));
    EXPECT_LE(worst_difference(losses("alone"), losses(name)), kDoubleBound)
        << name;
    EXPECT_LE(worst_difference(snapshot("alone"), snapshot(name)), kDoubleBound)
        << name;
    EXPECT_EQ(report("alone.json")["test_accuracy"],
              report(name + ".json")["test_accuracy"]);
  }
}

TEST_F(DigitsTest, LossCurveIsTheSameInFloat32AndTheNetworkLearns) {
  const std::vector<std::string> options{"--epochs", "5", "--lr", "5e-3"};
  ASSERT_NO_FATAL_FAILURE(train("alone", 1, options));
  ASSERT_NO_FATAL_FAILURE(train("2ranks", 2, options));
  EXPECT_LE(worst_difference(losses("alone"), losses("2ranks")),
            kFloatLossBound);
  // The demo trains 20 epochs and checks 97 %; these 5 epochs reach 96.4 %.
  EXPECT_GE(report("2ranks.json")["test_accuracy"].get<double>(), 0.94);
}

TEST_F(DigitsTest, KilledAtAnyMomentAndResumedIsBitIdentical) {
  const std::vector<std::string> options{"--epochs", "3", "--save-every", "3"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 2, options));

  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::minstd_rand random(seed);
  const std::string file = "killed.safetensors";
  std::vector<std::string> command{"digits", "--snapshot", path(file)};
  command.insert(command.end(), options.begin(), options.end());
  int kills = 0;
  std::string before;
  for (int attempt = 0; attempt < 2; ++attempt) {
    auto job = start_ranks({2}, command);
    ASSERT_TRUE(await_change(file, before));
    std::this_thread::sleep_for(milliseconds(random() % 100));
    job->signal(SIGKILL);
    if (job->finish(kAllowed).exit_code == 128 + SIGKILL) ++kills;
    EXPECT_TRUE(await_no_process(milliseconds(2000)));
    before = read_file(path(file));
  }
  EXPECT_GT(kills, 0) << "the training ended before it was killed";
  auto last = start_ranks({2}, command)->finish(kAllowed);
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_THAT(last.out, HasSubstr("Resuming training from snapshot at Epoch"));
  expect_same_bits(snapshot("whole"), snapshot("killed"));
  // No file of the interrupted saves is left.
  for (const auto& entry : fs::directory_iterator(scratch())) {
    EXPECT_THAT(entry.path().filename().string(),
                ::testing::AnyOf("whole.safetensors", "whole.json", file));
  }
}

TEST_F(DigitsTest, RestartedByTheLauncherIsBitIdentical) {
  const std::vector<std::string> options{"--epochs", "3", "--save-every", "3"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 2, options));

  std::vector<std::string> command{"digits", "--snapshot",
                                   path("killed.safetensors"), "--report",
                                   path("killed.json")};
  command.insert(command.end(), options.begin(), options.end());
  auto job = start_ranks({.ranks = 2, .max_restarts = 1}, command);
  ASSERT_TRUE(await_change("killed.safetensors", ""));
  auto victims = marked_processes({"RANK=1"});
  ASSERT_EQ(victims.size(), 1u);
  ::kill(victims[0], SIGKILL);
  auto result = job->finish(kAllowed);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GT(report("killed.json")["resumed_at_step"].get<int>(), 0);
  expect_same_bits(snapshot("whole"), snapshot("killed"));
}

// Pre-emption: no snapshot is due when the signal comes, so the last one is
// that of the signal, in the middle of an epoch.
TEST_F(DigitsTest, StoppedBySigtermAndResumedIsBitIdentical) {
  const std::vector<std::string> options{"--epochs", "15"};
  ASSERT_NO_FATAL_FAILURE(train("whole", 2, options));

  const std::string file = "stopped.safetensors";
  std::vector<std::string> command{"digits", "--snapshot", path(file)};
  command.insert(command.end(), options.begin(), options.end());
  auto job = start_ranks({2}, command);
  ASSERT_TRUE(await_change(file, ""));
  job->signal(SIGTERM);
  const auto stopped = job->finish(kAllowed);
  EXPECT_EQ(stopped.exit_code, 128 + SIGTERM) << stopped.err;
  const Snapshot last = snapshot("stopped");
  EXPECT_EQ(count(stopped.out,
                  "Stopped after step " + std::to_string(last.step) + "\n"),
            1)
      << stopped.out;

  const auto resumed = start_ranks({2}, command)->finish(kAllowed);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.out,
              HasSubstr(", step " + std::to_string(last.step) + "\n"));
  expect_same_bits(snapshot("whole"), snapshot("stopped"));
}

TEST_F(DigitsTest, StoppedAloneItHasTheExitCodeOfTheSignal) {
  auto alone = start_alone(
      {"digits", "--epochs", "1000", "--snapshot", path("alone.safetensors")});
  ASSERT_TRUE(await_change("alone.safetensors", ""));
  alone->signal(SIGINT);
  const auto result = alone->finish(kAllowed);
  EXPECT_EQ(result.exit_code, 128 + SIGINT) << result.err;
  EXPECT_THAT(result.out,
              HasSubstr("Stopped after step " +
                        std::to_string(snapshot("alone").step) + "\n"));
}

// Regression: after a kill between an epoch's last step and its snapshot, the
// rest of the resumed epoch was empty, and its mean loss was 0 / 0.
TEST_F(DigitsTest, ResumedBehindTheLastBatchOfAnEpochGivesNumbers) {
  ASSERT_NO_FATAL_FAILURE(train("x", 1, {"--epochs", "1"}));
  const Snapshot ended = snapshot("x");
  Snapshot cut = ended;
  cut.epochs_run = -1;
  cut.sampler_state = {{"epoch", 0},
                       {"seed", 0},
                       {"position", 11 * 128},
                       {"shuffle", 1},
                       {"dataset_size", 1438}};
  save_snapshot_file(path("x.safetensors"), cut);
  ASSERT_NO_FATAL_FAILURE(train("x", 1, {"--epochs", "1"}));
  expect_same_bits(ended, snapshot("x"));
  EXPECT_TRUE(report("x.json")["losses"].empty());
  EXPECT_GT(report("x.json")["test_accuracy"].get<double>(), 0.1);
}

TEST_F(DigitsTest, StartedAgainAfterItsEndReportsTheSameAccuracy) {
  ASSERT_NO_FATAL_FAILURE(train("x", 1, {"--epochs", "1"}));
  auto first = report("x.json");
  ASSERT_NO_FATAL_FAILURE(train("x", 1, {"--epochs", "1"}));
  EXPECT_EQ(report("x.json")["test_accuracy"], first["test_accuracy"]);
}

TEST_F(DigitsTest, WrongOptionsAreNamed) {
  for (auto [option, value, words] : std::vector<std::array<std::string, 3>>{
           {"--epoch", "3", "--epoch"},
           {"--epochs", "0", "--epochs"},
           {"--epochs", "many", "--epochs"},
           {"--batch-size", "0", "--batch-size"},
           {"--batch-size", "1439", "--batch-size"},
           {"--lr", "-1", "--lr"},
           {"--dtype", "int8", "float32"},
           {"--report", path("none/report.json"), "none/report.json"}}) {
    auto result = run_alone({"digits", "--epochs", "1", option, value});
    EXPECT_NE(result.exit_code, 0) << option << ' ' << value;
    EXPECT_THAT(result.err, HasSubstr(words));
  }
}

TEST_F(DigitsTest, BatchThatDoesNotDivideIsRefused) {
  auto result = run_ranks({2}, {"digits", "--batch-size", "127"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              HasSubstr("--batch-size is 127, which is not a multiple of the 2 "
                        "ranks; give a multiple"));
}

TEST_F(DigitsTest, WrongDataIsOneLineThatNamesTheFile) {
  const std::string data =
      read_file(LOCKSTEP_SOURCE_DIR "/datasets/digits/digits.csv");
  std::ofstream(path("half.csv")) << data.substr(0, data.size() / 2);
  std::ofstream(path("foreign.csv")) << "name,age\nAda,36\n";
  std::ofstream(path("long.csv")) << data << data;
  const std::ofstream empty(path("empty.csv"));
  for (const char* name :
       {"none.csv", "half.csv", "foreign.csv", "long.csv", "empty.csv"}) {
    auto result = run_alone({"digits", "--data", path(name)});
    EXPECT_EQ(result.exit_code, 1) << name;
    EXPECT_THAT(lines(result.err), ::testing::SizeIs(1)) << result.err;
    EXPECT_THAT(
        the_line(result.err, "digits: "),
        AllOf(HasSubstr(path(name)), HasSubstr("datasets/digits/digits.csv")));
  }
}

TEST_F(DigitsTest, WrongSnapshotIsOneLineARankAndLeftAsItIs) {
  ASSERT_NO_FATAL_FAILURE(train("good", 1, {"--epochs", "1"}));
  const std::string good = read_file(path("good.safetensors"));
  Snapshot foreign{.model_state = {{"weight", torch::ones({1, 20})},
                                   {"bias", torch::ones({1})}}};
  save_snapshot_file(path("foreign.safetensors"), foreign);
  save_snapshot_file(path("foreign.pt"), foreign);
  auto write = [&](const std::string& name, const std::string& bytes) {
    std::ofstream(path(name), std::ios::binary) << bytes;
  };
  write("text.safetensors", "epoch 3\nloss 0.1\n");
  write("text.pt", "epoch 3\nloss 0.1\n");
  write("half.safetensors", good.substr(0, good.size() / 2));
  const std::string pt = read_file(path("foreign.pt"));
  write("half.pt", pt.substr(0, pt.size() / 2));
  write("empty.pt", "");

  bool alone = true;
  for (const char* name :
       {"foreign.safetensors", "foreign.pt", "text.safetensors", "text.pt",
        "half.safetensors", "half.pt", "empty.pt"}) {
    SCOPED_TRACE(name);
    const std::string before = read_file(path(name));
    const std::vector<std::string> command{"digits", "--snapshot", path(name)};
    // Alternates, because one rank and two ranks must print the same words.
    auto result = alone ? run_alone(command) : run_ranks({2}, command);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_EQ(read_file(path(name)), before);
    std::string words;
    if (alone) {
      EXPECT_THAT(lines(result.err), ::testing::SizeIs(1)) << result.err;
      words = the_line(result.err, "digits: ");
    } else {
      // The launcher may stop a rank before it has printed its error.
      EXPECT_LE(count(result.err, "digits rank 0: "), 1);
      EXPECT_LE(count(result.err, "digits rank 1: "), 1);
      EXPECT_GE(count(result.err, "digits rank "), 1);
      words = result.err;
    }
    EXPECT_THAT(words, HasSubstr(path(name)));
    alone = !alone;
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
