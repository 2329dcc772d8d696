// Python's pipelining and ours train one model from the same weights on the
// same batches, with each schedule that both have, to the same losses and
// parameters.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/pipeline/stage_split.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using torch::nn::Sequential;

constexpr int kSteps = 20;
constexpr int64_t kWidth = 6;
constexpr int64_t kRows = 12;

// float64: the order of sums over micro-batches differs.
constexpr double kBound = 1e-10;

struct Case {
  const char* name;
  int micro_batches;
  int stages_per_rank;
};
constexpr Case kCases[] = {{"GPipe", 4, 1},
                           {"GPipe", 3, 1},
                           {"1F1B", 4, 1},
                           {"1F1B", 6, 1},
                           {"Interleaved1F1B", 4, 2},
                           {"InterleavedZeroBubble", 4, 2},
                           {"InterleavedZeroBubble", 6, 1},
                           {"ZBVZeroBubble", 4, 2},
                           {"ZBVZeroBubble", 6, 2}};

Sequential initial_model(int stages) {
  torch::manual_seed(5);
  Sequential model;
  for (int i = 0; i < stages; ++i) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
    model->push_back(torch::nn::Tanh());
    model->push_back(
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}).eps(0.1)));
  }
  model->to(torch::kDouble);
  return model;
}

// Trains all cases in Python, started by rank 0. Collective.
fs::path python_records(const World& world, const at::Tensor& x,
                        const at::Tensor& y) {
  const fs::path folder = world.folder / "python";
  if (world.rank == 0 && fs::create_directory(folder)) {
    NamedTensors initial{{"x", x}, {"y", y}};
    for (const auto& one : initial_model(2 * world.size)->named_parameters()) {
      initial.emplace_back(one.key(), one.value().detach());
    }
    save_tensors((folder / "initial.pt").string(), initial);
    std::ofstream cases(folder / "cases.txt");
    for (const Case& test : kCases) {
      cases << test.name << ' ' << test.micro_batches << ' '
            << test.stages_per_rank << '\n';
    }
    cases.close();
    run_python_peer({.arguments = {LOCKSTEP_SOURCE_DIR
                                   "/tests/parallel/pipeline/pipeline_peer.py",
                                   folder.string()},
                     .ranks = world.size,
                     .environment = {"TMPDIR=" + folder.string()}});
  }
  barrier();
  return folder;
}

WORLD_TEST(PipelineParity, LossesAndParametersArePythons, 2) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  auto group = init_process_group();
  torch::manual_seed(6);
  const at::Tensor x = torch::randn({kSteps, kRows, kWidth}, torch::kDouble);
  const at::Tensor y = torch::randn({kSteps, kRows, kWidth}, torch::kDouble);
  const fs::path folder = python_records(world, x, y);
  for (size_t i = 0; i < std::size(kCases); ++i) {
    const Case& test = kCases[i];
    SCOPED_TRACE(std::string(test.name) + " " +
                 std::to_string(test.micro_batches));
    std::map<std::string, at::Tensor> python;
    const std::string path = (folder / (std::to_string(i) + "." +
                                        std::to_string(world.rank) + ".pt"))
                                 .string();
    for (const auto& [name, value] : load_snapshot_file(path).model_state) {
      python[name] = value;
    }
    const PipelineSchedule schedule = make_pipeline_schedule(
        test.name, world.size, test.micro_batches, test.stages_per_rank);
    const auto facts = check_pipeline_schedule(schedule);
    Sequential model = initial_model(2 * world.size);
    std::vector<int64_t> begins;
    for (int stage = 0; stage < facts.stages; ++stage) {
      begins.push_back(3 * stage);
    }
    // The Python side has as many blocks as stages; drop the others.
    Sequential used;
    for (int64_t k = 0; k < 3 * facts.stages; ++k) {
      used->push_back(*(model->begin() + k));
    }
    std::vector<PipelineStage> mine;
    std::vector<at::Tensor> parameters;
    for (int stage = 0; stage < facts.stages; ++stage) {
      if (facts.rank_of_stage[static_cast<size_t>(stage)] != world.rank) {
        continue;
      }
      mine.emplace_back(stage, stage_of(used, begins, stage));
      for (const at::Tensor& one : mine.back().module().parameters()) {
        parameters.push_back(one);
      }
    }
    torch::optim::SGD optimizer(parameters,
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    Pipeline pipeline(
        mine, {.schedule = schedule,
               .loss = [](const at::Tensor& output, const at::Tensor& target) {
                 return torch::mse_loss(output, target);
               }});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const PipelineResult result = pipeline.step(x[step], y[step]);
      optimizer.step();
      ASSERT_EQ(result.loss.defined(), python.contains("losses"));
      if (!result.loss.defined()) continue;
      const at::Tensor losses = torch::stack(result.losses);
      EXPECT_TRUE(losses.allclose(python["losses"][step], 0, kBound)) << step;
    }
    size_t compared = 0;
    for (const PipelineStage& stage : mine) {
      for (const auto& one : stage.module().named_parameters()) {
        ASSERT_TRUE(python.contains(one.key())) << one.key();
        EXPECT_TRUE(one.value().allclose(python[one.key()], 0, kBound))
            << one.key();
        ++compared;
      }
    }
    EXPECT_EQ(compared, 4 * mine.size());
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
