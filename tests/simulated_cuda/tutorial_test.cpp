// The programs of PyTorch's "DDP tutorial series" on simulated GPUs: they print
// [GPU0], and train as on the CPU.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

class SimgpuTutorial : public ProgramTest {
 protected:
  // Runs `command`, and returns its output.
  std::string run(std::vector<std::string> command,
                  const std::string& visible_devices = "2,5") {
    auto result =
        start_program(
            command,
            {.environment = {"OMP_NUM_THREADS=1", "SIMULATED_CUDA_DEVICES=8",
                             "CUDA_VISIBLE_DEVICES=" + visible_devices},
             .folder = scratch()})
            ->finish(std::chrono::seconds(60));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  }
  std::vector<at::Tensor> trained(const std::string& file) {
    const auto path = scratch() / file;
    std::vector<at::Tensor> values;
    for (const auto& [name, tensor] :
         load_snapshot_file(path.string()).model_state) {
      values.push_back(tensor.clone());
    }
    std::filesystem::remove(path);
    return values;
  }
  static std::string of_cpu(const std::string& name) {
    return LOCKSTEP_BIN_DIR "/" + name;
  }
  static std::string of_gpu(const std::string& name) {
    return LOCKSTEP_BIN_DIR "/tests/simgpu_" + name;
  }
  static std::vector<std::string> launched(const std::string& ranks,
                                           const std::string& program) {
    return {LOCKSTEP_BIN_DIR "/lockstep",
            "run",
            "--standalone",
            "--nproc-per-node=" + ranks,
            program,
            "3",
            "2",
            "--loss",
            "mse"};
  }
  static void expect_close(const std::vector<at::Tensor>& gpu,
                           const std::vector<at::Tensor>& cpu) {
    ASSERT_EQ(gpu.size(), cpu.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      EXPECT_TRUE(gpu[i].allclose(cpu[i], 1e-5, 1e-6)) << gpu[i] << cpu[i];
    }
  }
};

TEST_F(SimgpuTutorial, SingleGpuTrainsOnTheGpu) {
  run({of_cpu("single_gpu"), "3", "2", "--loss=mse"}, "");
  const auto cpu = trained("checkpoint.pt");
  EXPECT_THAT(run({of_gpu("single_gpu"), "3", "2", "--loss=mse"}),
              HasSubstr("[GPU0] Epoch 2 | Batchsize: 32 | Steps: 64\n"));
  expect_close(trained("checkpoint.pt"), cpu);
}

TEST_F(SimgpuTutorial, MultigpuTrainsOnTwo) {
  run({of_cpu("multigpu"), "3", "2", "--loss=mse", "--nprocs=2"}, "");
  const auto cpu = trained("checkpoint.pt");
  const auto out =
      run({of_gpu("multigpu"), "3", "2", "--loss=mse", "--nprocs=2"});
  for (const char* rank : {"[GPU0]", "[GPU1]"}) {
    EXPECT_THAT(out, HasSubstr(std::string(rank) +
                               " Epoch 2 | Batchsize: 32 | Steps: 32\n"));
  }
  expect_close(trained("checkpoint.pt"), cpu);
}

TEST_F(SimgpuTutorial, MultigpuTorchrunResumesOnTwo) {
  run(launched("2", of_cpu("multigpu_torchrun")), "");
  const auto cpu = trained("snapshot.pt");
  const auto command = launched("2", of_gpu("multigpu_torchrun"));
  const auto out = run(command);
  for (const char* rank : {"[GPU0]", "[GPU1]"}) {
    EXPECT_THAT(out, HasSubstr(std::string(rank) +
                               " Epoch 2 | Batchsize: 32 | Steps: 32\n"));
  }
  EXPECT_THAT(run(command), HasSubstr("Resuming training from snapshot at "
                                      "Epoch 3\n"));
  expect_close(trained("snapshot.pt"), cpu);
}

TEST_F(SimgpuTutorial, MultinodeTrainsOnTwo) {
  const auto out = run(launched("2", of_gpu("multinode")));
  EXPECT_THAT(out, HasSubstr("[GPU1] Epoch 2 | Batchsize: 32 | Steps: 32\n"));
}

// The launcher counts the files of GPUs in /dev, of which this test makes eight
// in a namespace of its own.
TEST_F(SimgpuTutorial, ThereIsARankForEachVisibleGpu) {
  const std::vector<std::string> namespaced{"/usr/bin/unshare", "--user",
                                            "--map-root-user",  "--mount",
                                            "/bin/sh",          "-ec"};
  auto probe = namespaced;
  probe.emplace_back("mount -t tmpfs none /mnt");
  if (!std::filesystem::exists(probe.front()) ||
      start_program(probe, {.folder = scratch()})
              ->finish(std::chrono::seconds(20))
              .exit_code != 0) {
    GTEST_SKIP() << "needs unshare(1), and the right to mount";
  }
  auto command = namespaced;
  command.emplace_back(R"(
    mkdir -p dev/shm
    for file in nvidia0 nvidia1 nvidia2 nvidia3 nvidia4 nvidia5; do
      : > dev/$file
    done
    for file in null zero random urandom; do
      : > dev/$file
      mount --bind /dev/$file dev/$file
    done
    mount --rbind /dev/shm dev/shm
    mount --rbind dev /dev
    exec "$@")");
  command.emplace_back("sh");
  for (const auto& argument : launched("gpu", of_gpu("multigpu_torchrun"))) {
    command.push_back(argument);
  }
  const auto out = run(command, "4,1,3");
  EXPECT_THAT(out, HasSubstr("[GPU2] Epoch 2 | Batchsize: 32 | Steps: 22\n"));
  EXPECT_THAT(out, ::testing::Not(HasSubstr("[GPU3]")));
}

}  // namespace
}  // namespace lockstep::internal::testing
