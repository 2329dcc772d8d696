// Pipelines over GPUs have the numbers of the CPU in every schedule.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/pipeline/stage_split.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/pipeline/whole_model.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kPipelineSteps = 3;

std::vector<at::Tensor> train(const World& world,
                              const PipelineSchedule& schedule, bool tied,
                              const at::Device& device) {
  const auto facts = check_pipeline_schedule(schedule);
  torch::nn::Sequential model = whole_model(facts.stages);
  model->to(device);
  std::vector<PipelineStage> stages;
  std::vector<at::Tensor> parameters;
  for (int stage = 0; stage < facts.stages; ++stage) {
    if (facts.rank_of_stage[static_cast<size_t>(stage)] != world.rank) continue;
    auto part = stage_of(model, begins_of(facts.stages), stage);
    for (const auto& parameter : part->parameters()) {
      parameters.push_back(parameter);
    }
    stages.emplace_back(stage, part);
  }
  PipelineOptions options{.schedule = schedule, .loss = mse};
  if (tied) {
    const auto name = std::to_string(3 * (facts.stages - 1)) + ".weight";
    options.tied_weights = {
        {.holders = {{0, "0.weight"}, {facts.stages - 1, name}}}};
  }
  Pipeline pipeline(stages, options);
  torch::optim::SGD optimizer(parameters,
                              torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<at::Tensor> results;
  for (int step = 0; step < kPipelineSteps; ++step) {
    const Batch batch = batch_of(step, 2 * facts.micro_batches + step);
    optimizer.zero_grad();
    const auto result = pipeline.step(batch.x.to(device), batch.y.to(device));
    optimizer.step();
    if (result.loss.defined()) {
      results.push_back(result.loss);
      results.push_back(result.outputs.at(0));
    }
  }
  for (auto& value : values_of(parameters)) results.push_back(std::move(value));
  return results;
}

void expect_pipeline_as_on_cpu(const World& world,
                               const PipelineSchedule& schedule,
                               bool tied = false) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        return train(world, schedule, tied, device);
      },
      1e-12);
}

WORLD_TEST(SimgpuPipeline, EveryScheduleTrainsAsOnTheCpu, 2, 3) {
  const int n = world.size;
  for (const auto& schedule :
       {schedule_gpipe(n, n), schedule_1f1b(n, 2 * n),
        schedule_looped_bfs(n, n, 2), schedule_interleaved_1f1b(n, 2 * n, 2),
        schedule_interleaved_zero_bubble(n, 2 * n, 2),
        schedule_zbv_zero_bubble(n, 2 * n), schedule_dual_pipe_v(n, 2 * n)}) {
    expect_pipeline_as_on_cpu(world, schedule);
  }
}

WORLD_TEST(SimgpuPipeline, TiedWeightsStayEqual, 2, 3) {
  expect_pipeline_as_on_cpu(world, schedule_1f1b(world.size, 2 * world.size),
                            /*tied=*/true);
}

}  // namespace
}  // namespace lockstep::internal::testing
