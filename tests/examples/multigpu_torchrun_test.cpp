// Runs the tutorial's program: its lines, its snapshots, and its errors for a
// wrong environment or wrong arguments. Words and order are those of the
// PyTorch tutorial "Fault-tolerant Distributed Training with torchrun".

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "lockstep/launch/process/store_port.h"
#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// Sorts the lines, because those of two ranks come in any order.
std::vector<std::string> sorted_lines(const std::string& text) {
  auto all = lines(text);
  std::ranges::sort(all);
  return all;
}

class MultigpuTorchrunTest : public ExampleTest {};

TEST_F(MultigpuTorchrunTest, AlonePrintsTheTutorialsLines) {
  auto result = run_alone({"multigpu_torchrun", "12", "10"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, IsEmpty());
  std::vector<std::string> expected;
  for (int epoch = 0; epoch < 12; ++epoch) {
    expected.push_back("[CPU0] Epoch " + std::to_string(epoch) +
                       " | Batchsize: 32 | Steps: 64");
    if (epoch % 10 == 0) {
      expected.push_back("Epoch " + std::to_string(epoch) +
                         " | Training snapshot saved at snapshot.pt");
    }
  }
  EXPECT_EQ(lines(result.out), expected);
  EXPECT_TRUE(std::filesystem::exists(scratch() / "snapshot.pt"));
}

TEST_F(MultigpuTorchrunTest, TwoRanksHalveTheStepsAndResume) {
  auto first = run_ranks({2}, {"multigpu_torchrun", "11", "10"});
  EXPECT_EQ(first.exit_code, 0) << first.err;
  std::vector<std::string> expected{
      "Epoch 0 | Training snapshot saved at snapshot.pt",
      "Epoch 10 | Training snapshot saved at snapshot.pt"};
  for (const char* rank : {"[CPU0]", "[CPU1]"}) {
    for (int epoch = 0; epoch < 11; ++epoch) {
      expected.push_back(rank + std::string(" Epoch ") + std::to_string(epoch) +
                         " | Batchsize: 32 | Steps: 32");
    }
  }
  std::ranges::sort(expected);
  EXPECT_EQ(sorted_lines(first.out), expected);

  auto second = run_ranks({2}, {"multigpu_torchrun", "13", "10"});
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(
      lines(second.out),
      UnorderedElementsAre("Loading snapshot", "Loading snapshot",
                           "Resuming training from snapshot at Epoch 11",
                           "Resuming training from snapshot at Epoch 11",
                           "[CPU0] Epoch 11 | Batchsize: 32 | Steps: 32",
                           "[CPU1] Epoch 11 | Batchsize: 32 | Steps: 32",
                           "[CPU0] Epoch 12 | Batchsize: 32 | Steps: 32",
                           "[CPU1] Epoch 12 | Batchsize: 32 | Steps: 32"));
}

TEST_F(MultigpuTorchrunTest, OptionsAreSpelledEitherWay) {
  auto underscores =
      run_alone({"multigpu_torchrun", "--total_epochs", "1", "--save_every=5",
                 "--batch_size", "64", "--snapshot", "a.pt"});
  EXPECT_EQ(underscores.exit_code, 0) << underscores.err;
  EXPECT_THAT(lines(underscores.out),
              ElementsAre("[CPU0] Epoch 0 | Batchsize: 64 | Steps: 32",
                          "Epoch 0 | Training snapshot saved at a.pt"));
  auto dashes =
      run_alone({"multigpu_torchrun", "--save-every", "5", "--total-epochs=1",
                 "--batch-size=64", "--snapshot", "b.pt"});
  EXPECT_EQ(dashes.exit_code, 0) << dashes.err;
  EXPECT_THAT(lines(dashes.out),
              ElementsAre("[CPU0] Epoch 0 | Batchsize: 64 | Steps: 32",
                          "Epoch 0 | Training snapshot saved at b.pt"));
}

TEST_F(MultigpuTorchrunTest, WrongArgumentsAreNamed) {
  struct Mistake {
    std::vector<std::string> arguments;
    std::string words;
  };
  for (const auto& [arguments, words] :
       std::vector<Mistake>{{{}, "total_epochs"},
                            {{"5"}, "save_every"},
                            {{"0", "10"}, "total_epochs"},
                            {{"5", "0"}, "save_every"},
                            {{"five", "1"}, "total_epochs"},
                            {{"5", "1", "--batch_size", "0"}, "--batch_size"},
                            {{"5", "1", "7"}, "7"},
                            {{"5", "1", "--gpus", "2"}, "--gpus"}}) {
    std::vector<std::string> command{"multigpu_torchrun"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    auto result = run_alone(command);
    EXPECT_EQ(result.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_THAT(lines(result.err), ElementsAre(HasSubstr(words)));
    EXPECT_THAT(result.out, IsEmpty());
  }
}

TEST_F(MultigpuTorchrunTest, MissingVariablesAreNamedInOneLine) {
  auto result =
      start_rank({"RANK=0", "WORLD_SIZE=2"}, {"multigpu_torchrun", "1", "1"})
          ->finish(kAllowed);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(lines(result.err),
              ElementsAre(HasSubstr("not set: MASTER_ADDR, MASTER_PORT")));
}

// Starts the ranks without a launcher, which would stop the others.
TEST_F(MultigpuTorchrunTest, UnequalWorldSizesEndBothRanks) {
  auto port = StorePort::hold("127.0.0.1", 0);
  auto rank = [&](int number, int world_size) {
    return start_rank(
        {"RANK=" + std::to_string(number),
         "LOCAL_RANK=" + std::to_string(number),
         "WORLD_SIZE=" + std::to_string(world_size), "MASTER_ADDR=127.0.0.1",
         "MASTER_PORT=" + std::to_string(port.port())},
        {"multigpu_torchrun", "1", "1"});
  };
  for (auto [first, second] : {std::pair(2, 3), std::pair(3, 2)}) {
    auto zero = rank(0, first);
    auto one = rank(1, second);
    auto one_result = one->finish(std::chrono::seconds(20));
    auto zero_result = zero->finish(std::chrono::seconds(20));
    EXPECT_EQ(zero_result.exit_code, 1);
    EXPECT_EQ(one_result.exit_code, 1);
    EXPECT_THAT(zero_result.err + one_result.err,
                HasSubstr("start every rank with the same WORLD_SIZE"));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
