// Python's torchrun starts the examples, and snapshots go from the examples to
// Python and back.

#include <gmock/gmock.h>

#include <fstream>

#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

class TorchrunInterop : public ExampleTest {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
    }
  }
  // Python's torch leaves folders of logs and caches behind; scratch() is
  // removed with them.
  std::string temporary() const { return "TMPDIR=" + scratch().string(); }
  ProgramResult torchrun(const std::vector<std::string>& arguments) {
    return start_example({LOCKSTEP_TORCH_PYTHON, "-m", "torch.distributed.run",
                          "--standalone", "--nproc-per-node=2", "--no-python"},
                         arguments, {temporary()})
        ->finish(kAllowed);
  }
  ProgramResult python(const std::string& script) {
    std::ofstream(scratch() / "script.py") << script;
    return run_program({LOCKSTEP_TORCH_PYTHON, "script.py"},
                       {.environment = {temporary()}, .folder = scratch()},
                       kAllowed);
  }
};

TEST_F(TorchrunInterop, TutorialRunsAndPythonReadsItsSnapshot) {
  auto result = torchrun({"multigpu_torchrun", "3", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line :
       {"[CPU0] Epoch 0 | Batchsize: 32 | Steps: 32\n",
        "[CPU1] Epoch 2 | Batchsize: 32 | Steps: 32\n",
        "Epoch 2 | Training snapshot saved at snapshot.pt\n"}) {
    EXPECT_EQ(count(result.out, line), 1) << line << result.out;
  }
  auto read = python(R"(
import torch
snapshot = torch.load("snapshot.pt", weights_only=True)
layer = torch.nn.Linear(20, 1)
layer.load_state_dict(snapshot["MODEL_STATE"])
print(snapshot["EPOCHS_RUN"], list(snapshot["MODEL_STATE"]))
)");
  EXPECT_EQ(read.exit_code, 0) << read.err;
  EXPECT_EQ(read.out, "2 ['weight', 'bias']\n");
}

TEST_F(TorchrunInterop, PythonsTutorialSnapshotIsResumed) {
  auto written = python(R"(
import torch
torch.manual_seed(7)
torch.save({"MODEL_STATE": torch.nn.Linear(20, 1).state_dict(),
            "EPOCHS_RUN": 3}, "snapshot.pt")
)");
  ASSERT_EQ(written.exit_code, 0) << written.err;
  auto result = run_ranks({2}, {"multigpu_torchrun", "5", "4"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "Resuming training from snapshot at Epoch 4\n"),
            2);
  EXPECT_EQ(count(result.out, "Epoch 4 | Training snapshot saved"), 1);
  // Cross entropy of one logit has no gradient, so the program must save the
  // values that Python wrote.
  auto read = python(R"(
import torch
torch.manual_seed(7)
layer = torch.nn.Linear(20, 1)
snapshot = torch.load("snapshot.pt", weights_only=True)
print(snapshot["EPOCHS_RUN"], all(
    torch.equal(value, snapshot["MODEL_STATE"][name])
    for name, value in layer.state_dict().items()))
)");
  EXPECT_EQ(read.exit_code, 0) << read.err;
  EXPECT_EQ(read.out, "4 True\n");
}

// The file must be the same, byte by byte, under either launcher.
TEST_F(TorchrunInterop, DigitsTrainsAsUnderOurLauncher) {
  const std::vector<std::string> command{"digits", "--epochs", "1",
                                         "--snapshot"};
  auto with = [&](const char* file) {
    auto all = command;
    all.push_back(file);
    return all;
  };
  auto theirs = torchrun(with("theirs.safetensors"));
  EXPECT_EQ(theirs.exit_code, 0) << theirs.err;
  EXPECT_THAT(theirs.out, HasSubstr("Epoch  0 | loss "));
  auto ours = run_ranks({2}, with("ours.safetensors"));
  EXPECT_EQ(ours.exit_code, 0) << ours.err;
  EXPECT_FALSE(read_file(scratch() / "ours.safetensors").empty());
  EXPECT_TRUE(read_file(scratch() / "ours.safetensors") ==
              read_file(scratch() / "theirs.safetensors"));
}

}  // namespace
}  // namespace lockstep::internal::testing
