// Pipelines over ranks train as one process does: every schedule, sizes that do
// not divide, tied weights, several pipelines with DistributedDataParallel.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/pipeline/stage_split.h"
#include "lockstep/parallel/tensor/parallel_linear.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/pipeline/whole_model.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using torch::nn::Sequential;

std::vector<PipelineStage> stages_of(const Sequential& model,
                                     const PipelineSchedule& schedule,
                                     int rank) {
  const auto facts = check_pipeline_schedule(schedule);
  std::vector<PipelineStage> stages;
  for (int stage = 0; stage < facts.stages; ++stage) {
    if (facts.rank_of_stage[static_cast<size_t>(stage)] != rank) continue;
    stages.emplace_back(stage, stage_of(model, begins_of(facts.stages), stage));
  }
  return stages;
}

std::vector<at::Tensor> parameters_of(
    const std::vector<PipelineStage>& stages) {
  std::vector<at::Tensor> parameters;
  for (const PipelineStage& stage : stages) {
    for (const at::Tensor& parameter : stage.module().parameters()) {
      parameters.push_back(parameter);
    }
  }
  return parameters;
}

torch::optim::SGD optimizer_of(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters,
                           torch::optim::SGDOptions(0.1).momentum(0.9));
}

// Trains `model` in this process, and a copy as a pipeline; compares losses,
// outputs, gradients and parameters.
void expect_equal_training(const World& world, const PipelineSchedule& schedule,
                           int64_t rows, int steps = kSteps) {
  const int stages = check_pipeline_schedule(schedule).stages;
  Sequential single = whole_model(stages);
  auto single_optimizer = optimizer_of(single->parameters());
  Sequential model = whole_model(stages);
  auto mine = stages_of(model, schedule, world.rank);
  auto optimizer = optimizer_of(parameters_of(mine));
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  const bool is_last = mine.back().index() == stages - 1;
  at::Tensor first = single->parameters()[0].clone();
  for (int step = 0; step < steps; ++step) {
    const Batch batch = batch_of(step, rows);
    single_optimizer.zero_grad();
    const at::Tensor output = single->forward(batch.x);
    const at::Tensor loss = mse(output, batch.y);
    loss.backward();
    optimizer.zero_grad();
    const PipelineResult result = pipeline.step(batch.x, batch.y);
    ASSERT_EQ(result.loss.defined(), is_last);
    if (is_last) {
      EXPECT_LT(distance(result.loss, loss), kBound) << step;
      EXPECT_LT(distance(result.outputs.at(0), output), kBound) << step;
    }
    auto expected = single->named_parameters();
    for (const PipelineStage& stage : mine) {
      for (const auto& parameter : stage.module().named_parameters()) {
        ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
        EXPECT_LT(distance(parameter.value().grad(),
                           expected[parameter.key()].grad()),
                  kBound)
            << parameter.key() << " at step " << step;
      }
    }
    single_optimizer.step();
    optimizer.step();
  }
  EXPECT_GT(distance(single->parameters()[0], first), 0.01);
  auto expected = single->named_parameters();
  for (const PipelineStage& stage : mine) {
    for (const auto& parameter : stage.module().named_parameters()) {
      EXPECT_LT(distance(parameter.value(), expected[parameter.key()]), kBound)
          << parameter.key();
    }
  }
}

struct Kind {
  const char* name;
  int stages_per_rank;
};
constexpr Kind kKinds[] = {{"GPipe", 1},
                           {"1F1B", 1},
                           {"LoopedBFS", 2},
                           {"Interleaved1F1B", 2},
                           {"InterleavedZeroBubble", 2},
                           {"InterleavedZeroBubble", 1},
                           {"ZBVZeroBubble", 2},
                           {"DualPipeV", 2}};

WORLD_TEST(Pipeline, EveryScheduleTrainsAsOneProcess, 1, 2, 3, 4) {
  auto group = init_process_group();
  for (const Kind& kind : kKinds) {
    for (const int m : {1, world.size, 2 * world.size, 7}) {
      SCOPED_TRACE(std::string(kind.name) + " with " + std::to_string(m));
      PipelineSchedule schedule;
      try {
        schedule = make_pipeline_schedule(kind.name, world.size, m,
                                          kind.stages_per_rank);
      } catch (const std::invalid_argument&) {
        continue;  // not allowed for this number
      }
      expect_equal_training(world, schedule, 2 * m);
    }
  }
}

WORLD_TEST(Pipeline, ZbvTrainsAsOneProcessOnEightRanks, 8) {
  auto group = init_process_group();
  expect_equal_training(world, schedule_zbv_zero_bubble(8, 16), 16);
}

WORLD_TEST(Pipeline, TrainsOverGloo, 2) {
  auto group = init_process_group("gloo");
  expect_equal_training(world, schedule_1f1b(2, 4), 8, 3);
  expect_equal_training(world, schedule_zbv_zero_bubble(2, 4), 8, 3);
}

// Rows that do not divide: every row still counts once, and later batches may
// have other sizes.
WORLD_TEST(Pipeline, UnevenMicroBatchesCountByTheirRows, 2, 3) {
  auto group = init_process_group();
  const PipelineSchedule schedule =
      schedule_interleaved_zero_bubble(world.size, 2 * world.size, 2);
  for (const int64_t rows : {2 * world.size + 1, 4 * world.size - 1}) {
    expect_equal_training(world, schedule, rows, 3);
  }
  Sequential model = whole_model(2 * world.size);
  Pipeline pipeline(stages_of(model, schedule, world.rank),
                    {.schedule = schedule, .loss = mse});
  Sequential single = whole_model(2 * world.size);
  for (const int64_t rows : {12, 13, 12, 7, 13}) {
    const Batch batch = batch_of(0, rows);
    const PipelineResult result = pipeline.step(batch.x, batch.y);
    if (world.rank == world.size - 1) {
      EXPECT_LT(distance(result.outputs.at(0), single->forward(batch.x)),
                kBound);
    }
  }
}

WORLD_TEST(Pipeline, GradientsOfTwoStepsAdd, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(2, 4);
  Sequential model = whole_model(2), single = whole_model(2);
  auto mine = stages_of(model, schedule, world.rank);
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  for (const int step : {0, 1}) {
    const Batch batch = batch_of(step, 8);
    pipeline.step(batch.x, batch.y);
    mse(single->forward(batch.x), batch.y).backward();
  }
  auto expected = single->named_parameters();
  for (const auto& parameter : mine[0].module().named_parameters()) {
    EXPECT_LT(
        distance(parameter.value().grad(), expected[parameter.key()].grad()),
        kBound);
  }
}

WORLD_TEST(Pipeline, SumsOfRowsAreNotScaled, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_gpipe(2, 3);
  Sequential model = whole_model(2), single = whole_model(2);
  auto mine = stages_of(model, schedule, world.rank);
  const auto sum = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).pow(2).sum();
  };
  Pipeline pipeline(mine, {.schedule = schedule,
                           .loss = sum,
                           .scale_gradients = false,
                           .return_outputs = false});
  const Batch batch = batch_of(0, 7);
  const PipelineResult result = pipeline.step(batch.x, batch.y);
  EXPECT_TRUE(result.outputs.empty());
  const at::Tensor loss = sum(single->forward(batch.x), batch.y);
  loss.backward();
  if (world.rank == 1) {
    EXPECT_EQ(result.losses.size(), 3);
    EXPECT_LT(distance(result.loss, loss), kBound);
  }
  auto expected = single->named_parameters();
  for (const auto& parameter : mine[0].module().named_parameters()) {
    EXPECT_LT(
        distance(parameter.value().grad(), expected[parameter.key()].grad()),
        kBound);
  }
}

WORLD_TEST(Pipeline, EvalComputesOutputsWithoutGradients, 1, 2, 3) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_zbv_zero_bubble(world.size, 4);
  Sequential model = whole_model(2 * world.size);
  auto mine = stages_of(model, schedule, world.rank);
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  const Batch batch = batch_of(0, 9);
  const PipelineResult plain = pipeline.eval(batch.x);
  const PipelineResult with_loss = pipeline.eval(batch.x, batch.y);
  pipeline.step(batch.x, batch.y);
  EXPECT_EQ(plain.outputs.size(), world.rank == 0 ? 1 : 0);
  if (world.rank == 0) {  // the V ends where it begins
    Sequential single = whole_model(2 * world.size);
    const at::Tensor output = single->forward(batch.x);
    EXPECT_FALSE(plain.outputs[0].requires_grad());
    EXPECT_LT(distance(plain.outputs[0], output), kBound);
    EXPECT_FALSE(plain.loss.defined());
    EXPECT_LT(distance(with_loss.loss, mse(output, batch.y)), kBound);
    EXPECT_EQ(with_loss.losses.size(), 4);
  }
}

WORLD_TEST(Pipeline, InferenceModeMayComeBetweenSteps, 1, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(world.size, 2);
  Sequential single = whole_model(world.size);
  auto mine = stages_of(whole_model(world.size), schedule, world.rank);
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  for (int step = 0; step < 2; ++step) {
    const Batch batch = batch_of(step, 4);
    {
      const c10::InferenceMode inference;
      const PipelineResult result = pipeline.eval(batch.x, batch.y);
      EXPECT_EQ(result.loss.defined(), world.rank == world.size - 1);
    }
    pipeline.step(batch.x, batch.y);
    mse(single->forward(batch.x), batch.y).backward();
  }
  auto expected = single->named_parameters();
  for (const auto& item : mine.front().module().named_parameters()) {
    EXPECT_LT(distance(item.value().grad(), expected[item.key()].grad()),
              kBound);
  }
}

// A stage with two inputs and two outputs, one of which has no gradient.
struct PairStageImpl : torch::nn::Module {
  explicit PairStageImpl(bool frozen = false)
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {
    to(torch::kDouble);
    if (frozen) linear->weight.requires_grad_(false);
    if (frozen) linear->bias.requires_grad_(false);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x,
                                             const at::Tensor& ids) {
    return {torch::tanh(linear(x)) + ids.unsqueeze(1), ids + 1};
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(PairStage);

WORLD_TEST(Pipeline, StagesPassSeveralTensorsOfAnyKind, 2, 3) {
  auto group = init_process_group();
  for (const bool frozen : {false, true}) {
    torch::manual_seed(3);
    std::vector<PairStage> all;
    // The first stage may be frozen: then the second gets no gradient to send.
    for (int i = 0; i < world.size; ++i) all.emplace_back(frozen && i == 0);
    Pipeline pipeline(
        {{world.rank, all[static_cast<size_t>(world.rank)]}},
        {.schedule =
             schedule_interleaved_zero_bubble(world.size, world.size, 1),
         .loss = [](const std::vector<at::Tensor>& outputs,
                    const at::Tensor& target) {
           return mse(outputs[0], target) * outputs[1].sum() / outputs[1].sum();
         }});
    const Batch batch = batch_of(1, 2 * world.size);
    const at::Tensor ids = torch::arange(2 * world.size);
    const PipelineResult result = pipeline.step({batch.x, ids}, batch.y);
    const at::Tensor mine =
        all[static_cast<size_t>(world.rank)]->linear->weight.grad().defined()
            ? all[static_cast<size_t>(world.rank)]
                  ->linear->weight.grad()
                  .clone()
            : at::Tensor();
    at::Tensor x = batch.x, id = ids;
    for (PairStage& stage : all) {
      stage->zero_grad();
      std::tie(x, id) = stage->forward(x, id);
    }
    mse(x, batch.y).backward();
    const at::Tensor expected =
        all[static_cast<size_t>(world.rank)]->linear->weight.grad();
    ASSERT_EQ(mine.defined(), expected.defined());
    if (mine.defined()) {
      EXPECT_LT(distance(mine, expected), kBound);
    }
    if (world.rank == world.size - 1) {
      EXPECT_EQ(result.outputs.size(), 2);
      EXPECT_TRUE(result.outputs[1].equal(id));
    }
  }
}

// A language model whose last stage uses the embedding of the first.
struct EmbedImpl : torch::nn::Module {
  EmbedImpl()
      : weight(register_parameter("weight",
                                  torch::randn({7, kWidth}, torch::kDouble))) {}
  at::Tensor forward(const at::Tensor& ids) {
    return torch::tanh(torch::embedding(weight, ids));
  }
  at::Tensor weight;
};
TORCH_MODULE(Embed);
struct HeadImpl : torch::nn::Module {
  HeadImpl()
      : weight(register_parameter("weight",
                                  torch::randn({7, kWidth}, torch::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

at::Tensor entropy(const at::Tensor& logits, const at::Tensor& target) {
  return torch::cross_entropy_loss(logits, target);
}

WORLD_TEST(Pipeline, TiedWeightsTrainAsOne, 2, 3) {
  auto group = init_process_group();
  // ZBV has the first and the last stage on one rank.
  for (const auto& schedule :
       {schedule_1f1b(world.size, 2 * world.size),
        schedule_zbv_zero_bubble(world.size, 2 * world.size)}) {
    const auto facts = check_pipeline_schedule(schedule);
    torch::manual_seed(world.rank);  // the copies differ before
    Embed embed;
    Head head;
    Sequential middle = whole_model(facts.stages - 2);
    std::vector<PipelineStage> mine;
    const int last = facts.stages - 1;
    for (int stage = 0; stage <= last; ++stage) {
      if (facts.rank_of_stage[static_cast<size_t>(stage)] != world.rank) {
        continue;
      }
      if (stage == 0) {
        mine.emplace_back(stage, embed);
      } else if (stage == last) {
        mine.emplace_back(stage, head);
      } else {
        mine.emplace_back(
            stage, stage_of(middle, begins_of(facts.stages - 2), stage - 1));
      }
    }
    Pipeline pipeline(mine,
                      {.schedule = schedule,
                       .loss = entropy,
                       .tied_weights = {{{{0, "weight"}, {last, "weight"}}}}});
    auto optimizer = optimizer_of(parameters_of(mine));

    at::Tensor weight = embed->weight.detach().clone();
    broadcast(weight, 0);
    weight.requires_grad_();
    Sequential single = whole_model(facts.stages - 2);
    std::vector<at::Tensor> all = single->parameters();
    all.push_back(weight);
    auto single_optimizer = optimizer_of(all);
    for (int step = 0; step < kSteps; ++step) {
      torch::manual_seed(step);
      const at::Tensor ids = torch::randint(7, {6 * world.size});
      const at::Tensor next = torch::randint(7, {6 * world.size});
      // Every third step keeps the gradients of the one before.
      if (step % 3 != 0) optimizer.zero_grad();
      if (step % 3 != 0) single_optimizer.zero_grad();
      pipeline.step(ids, next);
      at::Tensor x = torch::tanh(torch::embedding(weight, ids));
      if (!single->is_empty()) x = single->forward(x);
      entropy(torch::linear(x, weight), next).backward();
      optimizer.step();
      single_optimizer.step();
    }
    const auto holds = [&](int stage) {
      return facts.rank_of_stage[static_cast<size_t>(stage)] == world.rank;
    };
    if (holds(0)) {
      EXPECT_LT(distance(embed->weight, weight), kBound);
      EXPECT_FALSE(layout_of(embed->weight)->duplicate);
    }
    if (holds(last)) {
      EXPECT_LT(distance(head->weight, weight), kBound);
      EXPECT_TRUE(layout_of(head->weight)->duplicate);
    }
    // The norm over all ranks, each weight once.
    double squares = 0;
    for (const at::Tensor& parameter : parameters_of(mine)) {
      if (layout_of(parameter)->duplicate) continue;
      squares += parameter.grad().pow(2).sum().item<double>();
    }
    at::Tensor norm = torch::tensor(squares, torch::kDouble);
    all_reduce(norm);
    double expected = 0;
    for (const at::Tensor& parameter : all) {
      expected += parameter.grad().pow(2).sum().item<double>();
    }
    EXPECT_NEAR(norm.item<double>(), expected, kBound);
  }
}

// A bug: the weights of the stages drifted apart in silence, or a rank waited
// for the gradient of another.
WORLD_TEST(Pipeline, ATiedWeightThatOnlySomeStagesTrainIsRefused, 2) {
  auto group = init_process_group();
  // ZBV has the first and the last stage on one rank.
  for (const bool on_one_rank : {false, true}) {
    const auto schedule =
        on_one_rank ? schedule_zbv_zero_bubble(2, 4) : schedule_1f1b(2, 4);
    const int stages = check_pipeline_schedule(schedule).stages;
    Embed embed;
    Head head;
    Sequential middle = whole_model(stages - 2);
    std::vector<PipelineStage> mine;
    if (world.rank == 0) mine.emplace_back(0, embed);
    if (on_one_rank && world.rank == 1) {
      for (int stage : {1, 2}) {
        mine.emplace_back(stage,
                          stage_of(middle, begins_of(stages - 2), stage - 1));
      }
    }
    if ((world.rank == 0) == on_one_rank) mine.emplace_back(stages - 1, head);
    Pipeline pipeline(
        mine, {.schedule = schedule,
               .loss = entropy,
               .tied_weights = {{{{0, "weight"}, {stages - 1, "weight"}}}}});
    const at::Tensor ids = torch::arange(8) % 7;
    embed->weight.set_requires_grad(false);
    EXPECT_THAT(message_of([&] { pipeline.step(ids, ids); }),
                HasSubstr("tied weight 0 (\"weight\" of stage 0) has "
                          "requires_grad true in some stages"));
    EXPECT_NO_THROW(pipeline.eval(ids, ids));
    embed->weight.set_requires_grad(true);
    EXPECT_NO_THROW(pipeline.step(ids, ids));
  }
}

WORLD_TEST(Pipeline, ParametersHaveALayout, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_gpipe(2, 2);
  Sequential model = whole_model(2);
  auto mine = stages_of(model, schedule, world.rank);
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  for (const at::Tensor& parameter : parameters_of(mine)) {
    const TensorLayout* layout = layout_of(parameter);
    ASSERT_NE(layout, nullptr);
    EXPECT_EQ(layout->box, whole_box(parameter.sizes().vec()));
    EXPECT_EQ(layout->groups.size(), 1);
    EXPECT_EQ(layout->groups[0]->size(), 2);
    EXPECT_FALSE(layout->duplicate);
  }
}

// Two stages Linear(5, 5) have a parameter "weight" each: a snapshot had the
// values of one for both, and full_state_dict() one tensor.
WORLD_TEST(Pipeline, StagesWithParametersOfOneNameAreNotSaved, 2, 4) {
  auto world_group = init_process_group();
  // Ranks 0 and 2, of two pipelines, have the same stage.
  const ProcessGroupPtr group =
      world.size == 2 ? new_group() : new_subgroups(2);
  torch::manual_seed(0);
  torch::nn::Linear part(kWidth, kWidth);
  part->to(torch::kDouble);
  auto optimizer = optimizer_of(part->parameters());
  TrainingState state{.model = part.ptr(), .optimizer = &optimizer};
  const std::string path = (world.folder / "same_names").string() + "/";
  save_snapshot(path, state);  // of replicas, as long as there is no pipeline
  torch::manual_seed(group->rank());
  part->reset_parameters();
  const PipelineSchedule schedule = schedule_1f1b(2, 2);
  Pipeline pipeline({{group->rank(), part}},
                    {.schedule = schedule, .loss = mse, .group = group});
  const auto expected = AllOf(
      HasSubstr("ranks have different parameters of one name, as stages of "
                "a pipeline or by set_placement(Own): \"bias\" on rank "
                "0 and on rank 1"),
      HasSubstr("stage_of()"));
  EXPECT_THAT(message_of([&] { full_state_dict(*part); }), expected);
  EXPECT_THAT(message_of([&] { save_snapshot(path, state); }), expected);
  EXPECT_THAT(message_of([&] { load_snapshot(path, state); }), expected);

  // A weight that both have under one name is one, but only that.
  Pipeline tied({{group->rank(), part}},
                {.schedule = schedule,
                 .loss = mse,
                 .tied_weights = {{{{0, "weight"}, {1, "weight"}}}},
                 .group = group});
  EXPECT_THAT(message_of([&] { save_snapshot(path, state); }), expected);
  Pipeline both({{group->rank(), part}},
                {.schedule = schedule,
                 .loss = mse,
                 .tied_weights = {{{{0, "weight"}, {1, "weight"}}},
                                  {{{0, "bias"}, {1, "bias"}}}},
                 .group = group});
  const at::Tensor weight = part->weight.detach().clone();
  EXPECT_EQ(full_state_dict(*part).size(), world.rank == 0 ? 2 : 0);
  save_snapshot(path, state);
  part->zero_grad();
  {
    const torch::NoGradGuard no_grad;
    part->weight.zero_();
  }
  EXPECT_TRUE(load_snapshot(path, state));
  EXPECT_TRUE(part->weight.equal(weight));
}

// Keeps a running mean, under the same name in every stage or not.
struct RunningMeanImpl : torch::nn::Module {
  RunningMeanImpl(int stage, bool same_name)
      : linear(register_module("linear" + std::to_string(stage),
                               torch::nn::Linear(kWidth, kWidth))),
        mask(register_buffer("mask", torch::ones(kWidth))),
        mean(
            register_buffer(same_name ? "mean" : "mean" + std::to_string(stage),
                            torch::zeros(kWidth))) {
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    mean += x.detach().mean(0);
    return linear(x * mask);
  }
  torch::nn::Linear linear;
  at::Tensor mask, mean;
};
TORCH_MODULE(RunningMean);

// Two stages with a buffer "mean" each: a snapshot had the values of the first
// rank for both, and full_state_dict() one tensor.
WORLD_TEST(Pipeline, StagesWithBuffersOfOneNameAreNotSaved, 2, 4) {
  auto world_group = init_process_group();
  // Ranks 0 and 2, of two pipelines, have the same stage.
  const ProcessGroupPtr group =
      world.size == 2 ? new_group() : new_subgroups(2);
  const PipelineSchedule schedule = schedule_1f1b(2, 2);
  const Batch batch = batch_of(world.rank, 8);  // replicas have others
  for (const bool same_name : {true, false}) {
    SCOPED_TRACE(same_name);
    torch::manual_seed(group->rank());
    RunningMean part(group->rank(), same_name);
    TrainingState state{.model = part.ptr()};
    const auto path = (world.folder / (same_name ? "one" : "two")).string();
    Pipeline pipeline({{group->rank(), part}},
                      {.schedule = schedule, .loss = mse, .group = group});
    // Until the values differ, one buffer serves both stages.
    save_snapshot(path + "/", state);
    EXPECT_EQ(full_state_dict(*part).size(), world.rank > 0 ? 0
                                             : same_name    ? 6
                                                            : 7);
    part->mean.fill_(3);
    EXPECT_TRUE(load_snapshot(path + "/", state));
    EXPECT_TRUE(part->mean.eq(0).all().item<bool>());
    // So one buffer does if only the replicas differ.
    part->mean.fill_(world.rank / 2);
    save_snapshot(path + "/", state);

    pipeline.step(batch.x, batch.y);
    if (same_name) {
      const auto expected = HasSubstr(
          "ranks have different buffers of one name, as stages of a pipeline "
          "or by set_placement(Own): \"mean\" on rank 0 and on rank 1");
      EXPECT_THAT(message_of([&] { full_state_dict(*part); }), expected);
      EXPECT_THAT(message_of([&] { save_snapshot(path + "/", state); }),
                  expected);
      continue;
    }
    std::vector<at::Tensor> of_stage;
    for (const int rank : {0, 1}) {
      of_stage.push_back(part->mean.clone());
      broadcast(of_stage.back(), rank);
    }
    save_snapshot(path + "/", state);
    part->mean.zero_();
    EXPECT_TRUE(load_snapshot(path + "/", state));
    EXPECT_FALSE(of_stage[0].equal(of_stage[1]));
    EXPECT_TRUE(part->mean.equal(of_stage[static_cast<size_t>(group->rank())]));
  }
}

// A model that has the other stages' parameters, too, with old values.
WORLD_TEST(Pipeline, AModelWithOtherStagesParametersIsNotSaved, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(2, 2);
  Sequential model = whole_model(2);
  Pipeline pipeline(stages_of(model, schedule, world.rank),
                    {.schedule = schedule, .loss = mse});
  EXPECT_THAT(
      message_of([&] { full_state_dict(*model); }),
      HasSubstr("the parameter \"0.bias\" on rank 0 and on rank 1 is "
                "one of a pipeline's stage, or a rank's own, only on rank 0"));
}

// The layouts named a group twice, and no order of groups was right, when a
// second pipeline was made over the same stages: clip_grad_norm_() threw.
WORLD_TEST(Pipeline, IsMadeAgainOverTheSameStages, 4) {
  auto world_group = init_process_group();
  const ProcessGroupPtr columns = new_subgroups(2);
  const ProcessGroupPtr other_columns = new_subgroups(2);
  const ProcessGroupPtr rows = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
  for (const char* kind : {"plain", "tensor", "sharded"}) {
    SCOPED_TRACE(kind);
    const PipelineSchedule schedule = schedule_1f1b(2, 4);
    Sequential whole = whole_model(2);
    const int index = columns->rank();
    Sequential part = stage_of(whole, begins_of(2), index);
    std::shared_ptr<torch::nn::Module> module = part.ptr();
    std::optional<PipelineStage> stage;
    std::optional<FullyShard<Sequential>> unit;
    if (kind == std::string("sharded")) {
      unit.emplace(part, FullyShardOptions{.group = rows});
      stage.emplace(index, *unit);
    } else if (kind == std::string("tensor")) {
      const auto name = std::to_string(3 * index);
      const auto linear =
          std::dynamic_pointer_cast<torch::nn::LinearImpl>(part->ptr(0));
      nn::ColumnParallelLinear columns_of(
          torch::nn::Linear(linear), {.group = rows, .gather_output = true});
      module = std::make_shared<torch::nn::Module>();
      module->register_module(name, columns_of.ptr());
      stage.emplace(index, columns_of);
    } else {
      stage.emplace(index, part);
    }
    torch::optim::SGD optimizer(module->parameters(), 0.1);
    const Batch batch = batch_of(0, 8);
    double norm = 0;
    for (const bool other_group : {false, false, true}) {
      // The pipeline before is gone, but what it attached is not.
      Pipeline pipeline({*stage},
                        {.schedule = schedule,
                         .loss = mse,
                         .group = other_group ? other_columns : columns});
      optimizer.zero_grad();
      pipeline.step(batch.x, batch.y);
      const auto now = clip_grad_norm_(optimizer, 100.0).item<double>();
      if (norm == 0) norm = now;
      EXPECT_NEAR(now, norm, kBound);
      for (const at::Tensor& parameter : module->parameters()) {
        EXPECT_EQ(layout_of(parameter)->groups.size(),
                  kind == std::string("plain") ? 1 : 2);
      }
      const auto full = full_state_dict(*module);
      EXPECT_EQ(full.size(), world.rank > 0                  ? 0
                             : kind == std::string("tensor") ? 4
                                                             : 8);
      TrainingState state{.model = module, .optimizer = &optimizer};
      save_snapshot((world.folder / kind).string() + "/", state);
    }
  }
}

// Two pipelines of two ranks train replicas on halves of the batch. PyTorch
// averages too early with schedules that have backwards in two parts (issue
// 144530).
WORLD_TEST(Pipeline, WithDdpGradientsAreAveragedAfterTheLastBackward, 4) {
  for (const char* backend : {"lockstep", "gloo"}) {
    auto world_group = init_process_group(backend);
    std::vector<ProcessGroupPtr> columns{new_group({0, 1}), new_group({2, 3})};
    std::vector<ProcessGroupPtr> rows{new_group({0, 2}), new_group({1, 3})};
    const ProcessGroupPtr column = columns[static_cast<size_t>(world.rank / 2)];
    const ProcessGroupPtr row = rows[static_cast<size_t>(world.rank % 2)];
    for (const char* name :
         {"InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B"}) {
      SCOPED_TRACE(std::string(backend) + " " + name);
      const PipelineSchedule schedule = make_pipeline_schedule(name, 2, 4, 2);
      const auto facts = check_pipeline_schedule(schedule);
      Sequential model = whole_model(4), single = whole_model(4);
      using Ddp = DistributedDataParallel<Sequential>;
      std::vector<std::unique_ptr<Ddp>> wrappers;
      std::vector<PipelineStage> mine;
      std::vector<at::Tensor> parameters;
      for (int stage = 0; stage < 4; ++stage) {
        if (facts.rank_of_stage[static_cast<size_t>(stage)] != column->rank()) {
          continue;
        }
        auto part = stage_of(model, begins_of(4), stage);
        wrappers.push_back(std::make_unique<Ddp>(
            part, DistributedDataParallelOptions{.process_group = row}));
        mine.emplace_back(stage, *wrappers.back());
      }
      auto optimizer = optimizer_of(parameters_of(mine));
      auto single_optimizer = optimizer_of(single->parameters());
      Pipeline pipeline(mine,
                        {.schedule = schedule, .loss = mse, .group = column});
      // Micro-batches go past the wrapper, which must not warn of them.
      const testing::KeptWarnings kept;
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = batch_of(step, 16);
        const int64_t begin = 8 * (world.rank / 2);
        // One step of three adds to the gradients of the step before.
        if (step % 3 != 2) optimizer.zero_grad(step % 2 == 0);
        if (step % 3 != 2) single_optimizer.zero_grad();
        pipeline.step(batch.x.slice(0, begin, begin + 8),
                      batch.y.slice(0, begin, begin + 8));
        mse(single->forward(batch.x), batch.y).backward();
        optimizer.step();
        single_optimizer.step();
      }
      EXPECT_TRUE(kept.texts().empty());
      auto expected = single->named_parameters();
      for (const PipelineStage& stage : mine) {
        for (const auto& parameter : stage.module().named_parameters()) {
          EXPECT_LT(distance(parameter.value(), expected[parameter.key()]),
                    kBound)
              << parameter.key();
        }
      }
    }
  }
}

// One of two stages: the first one gives bfloat16, and the last one float32 for
// the loss.
struct LoweredStageImpl : torch::nn::Module {
  explicit LoweredStageImpl(int index) {
    torch::manual_seed(7 + index);
    layers = register_module("layers", Sequential(torch::nn::Linear(8, 8)));
    if (index == 0) return;
    layers->push_back(torch::nn::Tanh());
    layers->push_back(
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}).eps(0.1)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const Autocast mixed(at::kCPU, at::kBFloat16, enabled);
    const at::Tensor y = layers->forward(x);
    return layers->size() == 1 ? y : y.to(at::kFloat);
  }
  Sequential layers{nullptr};
  bool enabled = true;
};
TORCH_MODULE(LoweredStage);

// The error that refuses mixed_precision recommends Autocast in forward.
WORLD_TEST(Pipeline, StagesOfDdpMayUseAutocastInForward, 4) {
  auto world_group = init_process_group();
  std::vector<ProcessGroupPtr> columns{new_group({0, 1}), new_group({2, 3})};
  std::vector<ProcessGroupPtr> rows{new_group({0, 2}), new_group({1, 3})};
  const ProcessGroupPtr column = columns[static_cast<size_t>(world.rank / 2)];
  const ProcessGroupPtr row = rows[static_cast<size_t>(world.rank % 2)];
  LoweredStage part(column->rank());
  using Ddp = DistributedDataParallel<LoweredStage>;
  Ddp lowered(
      part, {.process_group = row,
             .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  EXPECT_THAT(message_of([&] { PipelineStage(column->rank(), lowered); }),
              HasSubstr("use Autocast in the module's forward"));

  LoweredStage mine(column->rank());
  Ddp wrapper(mine, {.process_group = row});
  Pipeline pipeline(
      {{column->rank(), wrapper}},
      {.schedule = schedule_1f1b(2, 4), .loss = mse, .group = column});
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({16, 8}), y = torch::randn({16, 8});
  const int64_t begin = 8 * (world.rank / 2);
  pipeline.step(x.slice(0, begin, begin + 8), y.slice(0, begin, begin + 8));

  // One process runs the same micro-batches, because other sums are rounded
  // otherwise.
  const auto gradients_of = [&](bool enabled) {
    LoweredStage first(0), second(1);
    first->enabled = second->enabled = enabled;
    for (int i = 0; i < 8; ++i) {
      const at::Tensor output =
          second->forward(first->forward(x.slice(0, 2 * i, 2 * i + 2)));
      EXPECT_EQ(output.scalar_type(), at::kFloat);
      (mse(output, y.slice(0, 2 * i, 2 * i + 2)) / 8).backward();
    }
    std::vector<at::Tensor> gradients;
    for (const auto& parameter :
         (column->rank() == 0 ? first : second)->parameters()) {
      gradients.push_back(parameter.grad());
    }
    return gradients;
  };
  const auto expected = gradients_of(true), full = gradients_of(false);
  double rounding = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(distance(mine->parameters()[i].grad(), expected[i]), 1e-6) << i;
    rounding = std::max(rounding, distance(expected[i], full[i]));
  }
  EXPECT_GT(rounding, 1e-4);  // it was computed in bfloat16
}

// The wrapper's buckets do the averaging, so that each replica may step a part.
WORLD_TEST(Pipeline, StagesMayHaveAShardedOptimizer, 4) {
  auto world_group = init_process_group();
  std::vector<ProcessGroupPtr> columns{new_group({0, 1}), new_group({2, 3})};
  std::vector<ProcessGroupPtr> rows{new_group({0, 2}), new_group({1, 3})};
  const ProcessGroupPtr column = columns[static_cast<size_t>(world.rank / 2)];
  const ProcessGroupPtr row = rows[static_cast<size_t>(world.rank % 2)];
  const PipelineSchedule schedule = schedule_interleaved_zero_bubble(2, 4, 1);
  for (const bool shared : {false, true}) {
    SCOPED_TRACE(shared);
    Sequential model = whole_model(2), single = whole_model(2);
    auto part = stage_of(model, begins_of(2), column->rank());
    DistributedDataParallel<Sequential> wrapper(part, {.process_group = row});
    ZeroRedundancyOptimizer<optim::SGD> optimizer(
        wrapper, {.lr = 0.1, .momentum = 0.9}, {.shared_parameters = shared});
    auto single_optimizer = optimizer_of(single->parameters());
    Pipeline pipeline({{column->rank(), wrapper}},
                      {.schedule = schedule, .loss = mse, .group = column});
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batch_of(step, 16);
      const int64_t begin = 8 * (world.rank / 2);
      optimizer.zero_grad();
      single_optimizer.zero_grad();
      pipeline.step(batch.x.slice(0, begin, begin + 8),
                    batch.y.slice(0, begin, begin + 8));
      mse(single->forward(batch.x), batch.y).backward();
      optimizer.step();
      single_optimizer.step();
    }
    optimizer.synchronize();
    auto expected = single->named_parameters();
    for (const auto& parameter : part->named_parameters()) {
      EXPECT_LT(distance(parameter.value(), expected[parameter.key()]), kBound)
          << parameter.key();
    }
  }
}

// The module of a stage, which tells what had been awaited before its forward.
struct AwaitingStageImpl : torch::nn::Module {
  explicit AwaitingStageImpl(const int& count) : awaited(count) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    before_forward.push_back(awaited);
    return linear(x);
  }
  torch::nn::Linear linear{nullptr};
  const int& awaited;
  std::vector<int> before_forward{};
};
TORCH_MODULE(AwaitingStage);

// Regression: micro-batches read parameters in shared memory that other ranks
// were still stepping.
WORLD_TEST(Pipeline, MicroBatchesWaitForTheStepsOfOtherRanks, 1) {
  auto group = init_process_group();
  int awaited = 0;
  AwaitingStage stage(awaited);
  DistributedDataParallel<AwaitingStage> wrapper(stage);
  WrapperAccess::state(wrapper).set_forward_gate([&] { ++awaited; });
  Pipeline pipeline({{0, wrapper}},
                    {.schedule = schedule_1f1b(1, 2), .loss = mse});
  const Batch batch = batch_of(0, 4);
  for (const bool training : {true, false}) {
    SCOPED_TRACE(training);
    awaited = 0;
    stage->before_forward.clear();
    if (training) {
      pipeline.step(batch.x, batch.y);
    } else {
      pipeline.eval(batch.x);
    }
    EXPECT_THAT(stage->before_forward, ElementsAre(1, 1));
  }
}

WORLD_TEST(Pipeline, MistakesAreToldToAllRanks, 2, 3) {
  auto group = init_process_group();
  const int p = world.size;
  const PipelineSchedule schedule = schedule_gpipe(p, 4);
  Sequential model = whole_model(p);
  const auto mine = stages_of(model, schedule, world.rank);
  const auto refusal = [&](std::vector<PipelineStage> stages,
                           PipelineOptions options) {
    return message_of([&] { Pipeline(std::move(stages), std::move(options)); });
  };
  EXPECT_THAT(refusal(mine, {.schedule = schedule_gpipe(p + 1, 4)}),
              HasSubstr("but its group has " + std::to_string(p)));
  EXPECT_THAT(refusal(world.rank == 0 ? std::vector<PipelineStage>{} : mine,
                      {.schedule = schedule}),
              AllOf(HasSubstr("the stages 0, but it was given none"),
                    HasSubstr(world.rank == 0 ? "" : "rank 0: ")));
  EXPECT_THAT(
      refusal(mine, {.schedule = schedule_gpipe(p, world.rank == 1 ? 5 : 4)}),
      HasSubstr("rank 1 has another schedule"));
  EXPECT_THAT(
      refusal(mine, {.schedule = schedule,
                     .tied_weights = {{{{0, "0.wait"}, {1, "3.weight"}}}}}),
      HasSubstr("stage 0 has no parameter \"0.wait\""));
  EXPECT_THAT(
      refusal(mine, {.schedule = schedule,
                     .tied_weights = {{{{0, "0.weight"}, {1, "3.bias"}}}}}),
      HasSubstr("differ in tied weight 0: "));

  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  const Batch batch = batch_of(0, 8);
  EXPECT_THAT(message_of([&] { pipeline.step({}, batch.y); }),
              HasSubstr("rank of stage 0 was given no inputs"));
  EXPECT_THAT(
      message_of([&] { pipeline.step(batch.x.slice(0, 0, 3), batch.y); }),
      HasSubstr("3 rows cannot be divided into 4"));
  EXPECT_THAT(message_of([&] { pipeline.step(batch.x); }),
              HasSubstr("given no target"));
  EXPECT_THAT(
      message_of([&] { pipeline.step(batch.x, batch.y.slice(0, 0, 7)); }),
      HasSubstr("8 rows on rank 0, but the target has 7"));
  EXPECT_THAT(message_of([&] {
                if (world.rank == 1) {
                  pipeline.eval(batch.x);
                } else {
                  pipeline.step(batch.x, batch.y);
                }
              }),
              HasSubstr("rank 1 called Pipeline::eval(), but rank 0"));
  pipeline.step(batch.x, batch.y);  // all the same, it can be used further
}

// Fails in its third forward.
struct FailingImpl : torch::nn::Module {
  FailingImpl()
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (++forwards == 3) throw std::range_error("out of luck");
    return linear(x);
  }
  torch::nn::Linear linear;
  int forwards = 0;
};
TORCH_MODULE(Failing);

WORLD_TEST(Pipeline, AStageThatThrowsIsNamedOnAllRanks, 2, 3, 4) {
  for (const char* backend : {"lockstep", "gloo"}) {
    SCOPED_TRACE(backend);
    auto group = init_process_group(backend);
    const PipelineSchedule schedule = schedule_1f1b(world.size, 2 * world.size);
    Sequential model = whole_model(world.size);
    std::vector<PipelineStage> mine = stages_of(model, schedule, world.rank);
    if (world.rank == 1) mine = {{1, Failing()}};
    Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
    const Batch batch = batch_of(0, 8);
    const std::string message =
        message_of([&] { pipeline.step(batch.x, batch.y); });
    if (world.rank == 1) {
      EXPECT_EQ(message, "out of luck");
    } else {
      EXPECT_THAT(message, HasSubstr("rank 1 failed in 1F2 (stage 1, "
                                     "micro-batch 2): out of luck"));
    }
  }
}

// One process would throw in backward().
WORLD_TEST(Pipeline, ALossWithoutGradIsAnError, 1, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(world.size, 2);
  Sequential model = whole_model(world.size);
  Pipeline pipeline(stages_of(model, schedule, world.rank),
                    {.schedule = schedule,
                     .loss = [](const at::Tensor& x, const at::Tensor& target) {
                       return mse(x, target).detach();
                     }});
  const Batch batch = batch_of(0, 8);
  const std::string message =
      message_of([&] { pipeline.step(batch.x, batch.y); });
  const std::string words = "pipeline: rank " + std::to_string(world.size - 1) +
                            " failed in " + std::to_string(world.size - 1) +
                            "F0 (stage " + std::to_string(world.size - 1) +
                            ", micro-batch 0): the loss does not require grad";
  if (world.rank == world.size - 1) {
    EXPECT_THAT(message, StartsWith(words));
  } else {
    EXPECT_THAT(message, HasSubstr(words));
  }
}

// The rank whose stage cannot take so many tensors was not told which it was.
WORLD_TEST(Pipeline, AStageThatCannotTakeItsInputsIsNamed, 2) {
  auto group = init_process_group();
  PairStage first;
  torch::nn::Linear second(kWidth, kWidth);
  const PipelineStage stage =
      world.rank == 0 ? PipelineStage(0, first) : PipelineStage(1, second);
  Pipeline pipeline({stage}, {.schedule = schedule_1f1b(2, 2), .loss = mse});
  const Batch batch = batch_of(0, 8);
  EXPECT_THAT(
      message_of([&] { pipeline.step({batch.x, torch::arange(8)}, batch.y); }),
      HasSubstr("rank 1 failed in 1F0 (stage 1, micro-batch 0): the stage "
                "before returned 2 tensors"));
}

// A stage whose outputs change their shape although its inputs do not.
struct ChangingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return ++forwards > 4 ? x.sum(1, true) : x * 2;
  }
  int forwards = 0;
};
TORCH_MODULE(Changing);

WORLD_TEST(Pipeline, ShapesThatChangeAreAnError, 2) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_gpipe(2, 4);
  Sequential model = whole_model(2);
  std::vector<PipelineStage> mine = stages_of(model, schedule, world.rank);
  if (world.rank == 0) mine = {{0, Changing()}};
  Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
  const Batch batch = batch_of(0, 8);
  pipeline.step(batch.x, batch.y);
  EXPECT_THAT(message_of([&] { pipeline.step(batch.x, batch.y); }),
              HasSubstr("stage 0 returned Double[2, 1], but for inputs of the "
                        "same shapes it returned Double[2, 5] before"));
}

// Changes what it gets before anything else: by a parameter, its shape, and for
// good.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl()
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        bias(register_parameter("bias", torch::randn(kWidth))) {
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    x.unsqueeze_(0).squeeze_(0);
    x.add_(bias).relu_();
    return linear(x);
  }
  torch::nn::Linear linear;
  at::Tensor bias;
};
TORCH_MODULE(InPlace);

std::vector<InPlace> in_place_stages(int stages) {
  torch::manual_seed(7);
  return std::vector<InPlace>(static_cast<size_t>(stages));
}

// A stage whose first operation was in place threw on a rank that trains ("a
// leaf Variable that requires grad"), and so did the first stage if a parameter
// took part in it ("the output of a function that returns multiple views").
WORLD_TEST(Pipeline, StagesMayChangeTheirInputsInPlace, 1, 2, 3) {
  auto group = init_process_group();
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    const int m = 2 * world.size;
    const PipelineSchedule schedule =
        make_pipeline_schedule(kind.name, world.size, m, kind.stages_per_rank);
    const auto facts = check_pipeline_schedule(schedule);
    const auto single = in_place_stages(facts.stages);
    const auto stages = in_place_stages(facts.stages);
    std::vector<PipelineStage> mine;
    for (int i = 0; i < facts.stages; ++i) {
      const auto k = static_cast<size_t>(i);
      if (facts.rank_of_stage[k] == world.rank) mine.emplace_back(i, stages[k]);
    }
    Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
    const auto single_outputs = [&](const at::Tensor& x) {
      std::vector<at::Tensor> outputs;
      for (const at::Tensor& part : x.tensor_split(m)) {
        outputs.push_back(part.clone());
        for (InPlace stage : single) {
          outputs.back() = stage->forward(outputs.back());
        }
      }
      return outputs;
    };
    for (int step = 0; step < 2; ++step) {
      const Batch batch = batch_of(step, 2 * m);
      {
        const torch::NoGradGuard no_grad;
        const auto evaluated = pipeline.eval(batch.x.clone());
        if (!evaluated.outputs.empty()) {
          EXPECT_TRUE(
              evaluated.outputs[0].equal(torch::cat(single_outputs(batch.x))));
        }
      }
      const auto result = pipeline.step(batch.x.clone(), batch.y);
      const auto outputs = single_outputs(batch.x);
      const auto targets = batch.y.tensor_split(m);
      for (size_t k = 0; k < outputs.size(); ++k) {
        // In the order of the schedule's backwards, so that sums round alike.
        const bool falls = kind.name == std::string("LoopedBFS");
        const size_t i = falls ? outputs.size() - 1 - k : k;
        const at::Tensor loss = mse(outputs[i], targets[i]);
        loss.backward(torch::full_like(loss, 1.0 / m));
        if (result.loss.defined()) {
          EXPECT_TRUE(result.losses[i].equal(loss));
        }
      }
    }
    for (const PipelineStage& stage : mine) {
      const auto expected =
          single[static_cast<size_t>(stage.index())]->named_parameters();
      for (const auto& parameter : stage.module().named_parameters()) {
        EXPECT_TRUE(
            parameter.value().grad().equal(expected[parameter.key()].grad()))
            << parameter.key() << " of stage " << stage.index();
      }
    }
  }
}

// As in one process: tanh needs its result, which the next stage has changed.
WORLD_TEST(Pipeline, AChangeOfWhatBackwardNeedsIsAnError, 1) {
  auto group = init_process_group();
  torch::nn::Linear linear(kWidth, kWidth);
  linear->to(torch::kDouble);
  Pipeline pipeline(
      {{0, Sequential(linear, torch::nn::Tanh())}, {1, InPlace()}},
      {.schedule = schedule_looped_bfs(1, 2, 2), .loss = mse});
  const Batch batch = batch_of(0, 8);
  EXPECT_THAT(message_of([&] { pipeline.step(batch.x, batch.y); }),
              HasSubstr("modified by an inplace operation"));
}

// A rank without parameters did not know the scale, and its peers waited for it
// until the deadline.
WORLD_TEST(Pipeline, ARankWithoutParametersTakesPartInScaling, 2, 3) {
  auto group = init_process_group();
  for (const int empty : {0, world.size - 1}) {
    SCOPED_TRACE(empty);
    std::vector<int64_t> begins;
    const auto make = [&] {
      torch::manual_seed(5);
      Sequential whole;
      begins.clear();
      for (int stage = 0; stage < world.size; ++stage) {
        begins.push_back(static_cast<int64_t>(whole->size()));
        if (stage != empty) {
          whole->push_back(torch::nn::Linear(kWidth, kWidth));
        }
        whole->push_back(torch::nn::Tanh());
      }
      return whole;
    };
    Sequential single = make(), whole = make();
    Sequential part = stage_of(whole, begins, world.rank);
    const GradScalerOptions options{
        .device = at::kCPU, .init_scale = 8, .growth_interval = 2};
    GradScaler scaler(options), single_scaler(options);
    Pipeline pipeline(
        {{world.rank, part}},
        {.schedule =
             schedule_interleaved_zero_bubble(world.size, world.size, 1),
         .loss = [&](const at::Tensor& output, const at::Tensor& target) {
           return scaler.scale(mse(output, target));
         }});
    auto parameters = part->parameters();
    EXPECT_EQ(parameters.empty(), world.rank == empty);
    if (parameters.empty()) parameters = {pipeline.empty_parameter()};
    auto optimizer = optimizer_of(parameters);
    auto single_optimizer = optimizer_of(single->parameters());
    int skipped = 0;
    for (int step = 0; step < 8; ++step) {
      Batch batch = batch_of(step, 2 * world.size);
      batch.x = batch.x.to(torch::kFloat);
      batch.y = batch.y.to(torch::kFloat);
      // In step 2 all ranks that have parameters get gradients that are not
      // finite, in step 5 at most the first.
      if (step == 2) batch.y[0][0] = INFINITY;
      if (step == 5) batch.x[0][0] = INFINITY;
      optimizer.zero_grad();
      single_optimizer.zero_grad();
      pipeline.step(batch.x, batch.y);
      single_scaler.scale(mse(single->forward(batch.x), batch.y)).backward();
      if (step % 2 == 0) {
        scaler.unscale_(optimizer);
        single_scaler.unscale_(single_optimizer);
        const auto norm = clip_grad_norm_(optimizer, 0.1).item<double>();
        const auto want = clip_grad_norm_(single_optimizer, 0.1).item<double>();
        if (std::isfinite(want)) {
          EXPECT_NEAR(norm, want, 1e-5);
        }
      }
      scaler.step(optimizer);
      single_scaler.step(single_optimizer);
      EXPECT_EQ(scaler.found_inf(optimizer),
                single_scaler.found_inf(single_optimizer));
      skipped += scaler.found_inf(optimizer) ? 1 : 0;
      scaler.update();
      single_scaler.update();
      EXPECT_EQ(scaler.get_scale(), single_scaler.get_scale()) << step;
    }
    EXPECT_EQ(skipped, empty == 0 ? 1 : 2);
    TrainingState state{.model = part.ptr(), .optimizer = &optimizer};
    const std::string path =
        (world.folder / std::to_string(empty)).string() + "/";
    save_snapshot(path, state);
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : parameters) parameter.zero_();
    }
    EXPECT_TRUE(load_snapshot(path, state));
    auto expected = single->named_parameters();
    for (const auto& parameter : part->named_parameters()) {
      EXPECT_LT(distance(parameter.value(), expected[parameter.key()]), 1e-5)
          << parameter.key();
    }
    // The snapshot knows nothing of a parameter that stands for none.
    Sequential loaded = make();
    auto loaded_optimizer = optimizer_of(loaded->parameters());
    TrainingState all{.model = loaded.ptr(), .optimizer = &loaded_optimizer};
    EXPECT_TRUE(load_snapshot(path, all));
    for (const auto& parameter : loaded->named_parameters()) {
      EXPECT_LT(distance(parameter.value(), expected[parameter.key()]), 1e-5)
          << parameter.key();
    }
  }
}

TEST(StageSplit, TheDearestStageIsAsCheapAsPossible) {
  EXPECT_THAT(balanced_begins({1, 1, 1, 1}, 2), ElementsAre(0, 2));
  EXPECT_THAT(balanced_begins({1, 1, 4, 1, 1}, 3), ElementsAre(0, 2, 3));
  EXPECT_THAT(balanced_begins({3, 1, 1, 1, 3}, 3), ElementsAre(0, 1, 4));
  EXPECT_THAT(balanced_begins({5, 1}, 2), ElementsAre(0, 1));
  EXPECT_THAT(message_of([] { balanced_begins({1}, 2); }),
              HasSubstr("1 children cannot be divided into 2 stages"));
}

TEST(StageSplit, PartsKeepTheirNames) {
  const Sequential model = whole_model(3);
  const Sequential part = stage_of(model, {0, 2, 6}, 1);
  std::vector<std::string> names;
  for (const auto& parameter : part->named_parameters()) {
    names.push_back(parameter.key());
    EXPECT_TRUE(
        parameter.value().is_same(model->named_parameters()[parameter.key()]));
  }
  EXPECT_THAT(names, ElementsAre("2.weight", "2.bias", "3.weight", "3.bias",
                                 "5.weight", "5.bias"));
  for (const std::vector<int64_t>& begins :
       {std::vector<int64_t>{}, {1, 2}, {0, 0}, {0, 9}, {0, 4, 2}}) {
    EXPECT_THAT(message_of([&] { stage_of(model, begins, 0); }),
                HasSubstr("cannot begin at"));
  }
}

// A parameter of the loss, which only the last rank has, counted by one part in
// as many as there are ranks.
WORLD_TEST(Pipeline, ParametersOfTheLossAreInTheNorm, 2, 3) {
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(world.size, world.size);
  const auto make_loss = [](const torch::nn::Linear& head) {
    return [head = head.ptr()](const at::Tensor& output,
                               const at::Tensor& target) {
      return mse(head->forward(output), target);
    };
  };
  torch::manual_seed(3);
  torch::nn::Linear single_head(kWidth, kWidth);
  single_head->to(torch::kDouble);
  torch::nn::Linear head(kWidth, kWidth);
  head->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    head->weight.copy_(single_head->weight);
    head->bias.copy_(single_head->bias);
  }
  Sequential single = whole_model(world.size);
  Sequential model = whole_model(world.size);
  auto mine = stages_of(model, schedule, world.rank);
  auto parameters = parameters_of(mine);
  if (world.rank == world.size - 1) {
    for (const auto& one : head->parameters()) parameters.push_back(one);
  }
  auto optimizer = optimizer_of(parameters);
  Pipeline pipeline(mine, {.schedule = schedule, .loss = make_loss(head)});
  auto all = single->parameters();
  for (const auto& one : single_head->parameters()) all.push_back(one);
  auto single_optimizer = optimizer_of(all);
  for (int step = 0; step < 3; ++step) {
    const Batch batch = batch_of(step, 2 * world.size);
    optimizer.zero_grad();
    single_optimizer.zero_grad();
    pipeline.step(batch.x, batch.y);
    make_loss(single_head)(single->forward(batch.x), batch.y).backward();
    EXPECT_NEAR(clip_grad_norm_(optimizer, 0.1).item<double>(),
                clip_grad_norm_(all, 0.1).item<double>(), kBound);
    optimizer.step();
    single_optimizer.step();
  }
  if (world.rank == world.size - 1) {
    EXPECT_LT(distance(head->weight, single_head->weight), kBound);
  }
}

struct ScaledStageImpl : torch::nn::Module {
  ScaledStageImpl() {
    torch::manual_seed(3);
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    scale = register_parameter("scale", torch::full({1}, 2.0));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
  at::Tensor scale;
};

// Nothing averaged them over the replicas, which drifted apart in silence.
WORLD_TEST(Pipeline, ParametersOfTheLossAreThoseOfAReplicatedStage, 2) {
  for (const bool divided : {false, true}) {
    for (const bool registered : {false, true}) {
      SCOPED_TRACE(c10::str("divided ", divided, ", registered ", registered));
      auto group = init_process_group();
      const auto alone = split_group({{0}, {1}});
      const auto module = std::make_shared<ScaledStageImpl>();
      const auto other = torch::full({1}, 2.0, torch::kDouble).requires_grad_();
      const auto loss = [&](const at::Tensor& output,
                            const at::Tensor& target) {
        return mse(output * (registered ? module->scale : other), target);
      };
      std::unique_ptr<DistributedDataParallel<ScaledStageImpl>> model;
      std::vector<PipelineStage> stages;
      if (divided) {
        stages.emplace_back(0, FullyShard(module, {.shared_memory = false}));
      } else {
        model =
            std::make_unique<DistributedDataParallel<ScaledStageImpl>>(module);
        stages.emplace_back(0, *model);
      }
      Pipeline pipeline(
          stages,
          {.schedule = schedule_gpipe(1, 2), .loss = loss, .group = alone});
      const auto step = [&] {
        const Batch batch = batch_of(world.rank, 4);
        pipeline.step(batch.x, batch.y);
      };
      if (!registered) {
        EXPECT_THAT(message_of(step),
                    AllOf(HasSubstr("the loss has a parameter of its own, of "
                                    "shape [1]"),
                          HasSubstr("over the 2 replicas"),
                          HasSubstr("register it in the module")));
        continue;
      }
      step();
      ScaledStageImpl single;
      for (int rank = 0; rank < 2; ++rank) {
        const Batch batch = batch_of(rank, 4);
        (mse(single.forward(batch.x) * single.scale, batch.y) / 2).backward();
      }
      auto expected = single.named_parameters();
      for (const auto& item : module->named_parameters()) {
        // A shard is a part, which may be empty.
        at::Tensor sum = item.value().grad().sum();
        if (divided) all_reduce(sum);
        EXPECT_LT(distance(sum, expected[item.key()].grad().sum()), kBound)
            << item.key();
      }
    }
  }
}

struct AuxStageImpl : ScaledStageImpl {
  at::Tensor forward(const at::Tensor& x) {
    aux = (scale * x).square().mean();
    return scale * linear(x);
  }
  at::Tensor aux;
};

// Its graph leads past the outputs of the stage to the inputs.
WORLD_TEST(Pipeline, ALossMayReadAMemberOfAReplicatedStage, 4) {
  auto group = init_process_group();
  const auto pipe = split_group({{0, 1}, {2, 3}});
  const auto replicas = split_group({{0, 2}, {1, 3}});
  const auto module = std::make_shared<AuxStageImpl>();
  DistributedDataParallel<AuxStageImpl> model(module,
                                              {.process_group = replicas});
  std::vector<PipelineStage> stages;
  stages.emplace_back(pipe->rank(), model);
  const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
    return mse(output, target) + module->aux;
  };
  Pipeline pipeline(
      stages, {.schedule = schedule_gpipe(2, 1), .loss = loss, .group = pipe});
  const Batch own = batch_of(world.rank / 2, 4);
  pipeline.step(own.x, own.y);
  AuxStageImpl single[2];
  for (int replica = 0; replica < 2; ++replica) {
    const Batch batch = batch_of(replica, 4);
    const auto output = single[1].forward(single[0].forward(batch.x));
    ((mse(output, batch.y) + single[1].aux) / 2).backward();
  }
  auto expected = single[pipe->rank()].named_parameters();
  for (const auto& item : module->named_parameters()) {
    EXPECT_LT(distance(item.value().grad(), expected[item.key()].grad()),
              kBound)
        << item.key();
  }
}

// Micro-batches with few targets that are not ignored weighed as much as those
// with many, and one without any made the loss NaN.
WORLD_TEST(Pipeline, IgnoredTargetsDoNotCount, 1, 2, 3) {
  namespace F = torch::nn::functional;
  auto group = init_process_group();
  const PipelineSchedule schedule = schedule_1f1b(world.size, 4);
  Sequential single = whole_model(world.size);
  Sequential model = whole_model(world.size);
  auto mine = stages_of(model, schedule, world.rank);
  const auto loss_by = [](auto reduction) {
    return [reduction](const at::Tensor& output, const at::Tensor& target) {
      return F::cross_entropy(
          output, target,
          F::CrossEntropyFuncOptions().ignore_index(-100).reduction(reduction));
    };
  };
  Pipeline pipeline(mine, {.schedule = schedule,
                           .loss = loss_by(torch::kSum),
                           .loss_count = [](const at::Tensor& target) {
                             return target.ne(-100).sum().item<double>();
                           }});
  const at::Tensor x = batch_of(0, 8).x;
  at::Tensor target = torch::arange(8) % kWidth;
  target.slice(0, 0, 3).fill_(-100);  // all of the first micro-batch
  const auto result = pipeline.step(x, target);
  const at::Tensor loss = loss_by(torch::kMean)(single->forward(x), target);
  loss.backward();
  if (result.loss.defined()) {
    EXPECT_LT(distance(result.loss, loss), kBound);
  }
  auto expected = single->named_parameters();
  const auto of_mine = [&](const auto& check) {
    for (const PipelineStage& stage : mine) {
      for (const auto& item : stage.module().named_parameters()) {
        check(item.key(), item.value());
      }
    }
  };
  of_mine([&](const std::string& name, const at::Tensor& parameter) {
    EXPECT_LT(distance(parameter.grad(), expected[name].grad()), kBound);
  });
  const auto evaluated = pipeline.eval(x, target);
  if (evaluated.loss.defined()) {
    EXPECT_LT(distance(evaluated.loss, loss), kBound);
  }
  // A batch without any target.
  of_mine([](const std::string&, const at::Tensor& parameter) {
    parameter.mutable_grad().reset();
  });
  const auto none = pipeline.step(x, at::full_like(target, -100));
  if (none.loss.defined()) {
    EXPECT_EQ(none.loss.item<double>(), 0);
  }
  of_mine([](const std::string&, const at::Tensor& parameter) {
    EXPECT_EQ(parameter.grad().abs().max().item<double>(), 0);
  });
  // A count that fails is told to all ranks.
  Pipeline failing(mine, {.schedule = schedule,
                          .loss = loss_by(torch::kSum),
                          .loss_count = [](const at::Tensor&) -> double {
                            throw std::runtime_error("out of numbers");
                          }});
  EXPECT_THAT(message_of([&] { failing.step(x, target); }),
              HasSubstr("loss_count failed: out of numbers"));
  EXPECT_THAT(message_of([&] {
                Pipeline(mine, {.schedule = schedule,
                                .loss = loss_by(torch::kSum),
                                .loss_count = [](auto&) { return 1.0; },
                                .scale_gradients = false});
              }),
              HasSubstr("give one of them"));
}

// The gradients that a rank had told to send, or not to, were not those of the
// unfrozen stage: the job ended in the middle of the step.
WORLD_TEST(Pipeline, StagesMayBeFrozenAndUnfrozen, 2, 3) {
  for (const char* backend : {"", "gloo"}) {
    auto group = init_process_group(backend);
    const PipelineSchedule schedule =
        schedule_interleaved_zero_bubble(world.size, world.size, 1);
    Sequential single = whole_model(world.size);
    Sequential model = whole_model(world.size);
    auto mine = stages_of(model, schedule, world.rank);
    auto optimizer = optimizer_of(parameters_of(mine));
    auto single_optimizer = optimizer_of(single->parameters());
    Pipeline pipeline(mine, {.schedule = schedule, .loss = mse});
    // The parameters of the first stage.
    const auto first = stage_of(single, begins_of(world.size), 0);
    for (int step = 0; step < 6; ++step) {
      const bool trained = step % 3 == 1;
      for (const auto& one : first->parameters())
        one.set_requires_grad(trained);
      if (world.rank == 0) {
        for (const auto& one : parameters_of(mine)) {
          one.set_requires_grad(trained);
        }
      }
      const Batch batch = batch_of(step, 2 * world.size);
      optimizer.zero_grad();
      single_optimizer.zero_grad();
      pipeline.step(batch.x, batch.y);
      mse(single->forward(batch.x), batch.y).backward();
      optimizer.step();
      single_optimizer.step();
    }
    auto expected = single->named_parameters();
    for (const PipelineStage& stage : mine) {
      for (const auto& item : stage.module().named_parameters()) {
        EXPECT_LT(distance(item.value(), expected[item.key()]), kBound);
      }
    }
  }
}

// Gloo says that the time is over, and not which rank was awaited.
WORLD_TEST(Pipeline, ASilentRankIsNamedOnGloo, 3) {
  for (const bool in_a_stage : {false, true}) {
    SCOPED_TRACE(in_a_stage);
    auto group = init_process_group(
        "gloo", {.timeout = std::chrono::milliseconds(2000)});
    const PipelineSchedule schedule = schedule_1f1b(3, 3);
    Sequential model = whole_model(3);
    auto store = inside(group).store();
    const auto stay = [&] {
      store->wait({"failed/0", "failed/1"}, std::chrono::seconds(60));
    };
    Pipeline pipeline(stages_of(model, schedule, world.rank),
                      {.schedule = schedule,
                       .loss = [&](const at::Tensor& x, const at::Tensor& y) {
                         if (in_a_stage) stay();
                         return mse(x, y);
                       }});
    const Batch batch = batch_of(0, 6);
    if (world.rank == 2) {
      if (in_a_stage) {
        message_of([&] { pipeline.step(batch.x, batch.y); });
      } else {
        stay();
      }
      store->set("stayed", std::vector<uint8_t>{1});
    } else {
      EXPECT_THAT(message_of([&] { pipeline.step(batch.x, batch.y); }),
                  HasSubstr("of the pipeline's ranks, rank 2 did not come in "
                            "time"));
      store->set("failed/" + std::to_string(world.rank),
                 std::vector<uint8_t>{1});
      store->wait({"stayed"}, std::chrono::seconds(60));
    }
  }
}

WORLD_TEST(StageSplit, MeasuredBalanceIsTheSameOnAllRanks, 2) {
  auto group = init_process_group();
  Sequential model(torch::nn::Linear(256, 256), torch::nn::Tanh(),
                   torch::nn::BatchNorm1d(256), torch::nn::Dropout(0.1));
  const at::Tensor before = model->buffers()[0].clone();
  const at::Tensor input = torch::randn({256, 256});
  const at::Tensor generator = generator_state(nullptr);
  const auto begins = balanced_begins(model, input, 2);
  EXPECT_EQ(begins.size(), 2);
  // Regression: the rank that measured had drawn, and shuffled the next epoch
  // in another order than the others.
  EXPECT_TRUE(generator_state(nullptr).equal(generator));
  EXPECT_TRUE(model->buffers()[0].equal(before));
  EXPECT_FALSE(model->parameters()[0].grad().defined());
  at::Tensor mine = torch::tensor(begins);
  at::Tensor most = mine.clone();
  all_reduce(most, {.op = ReduceOp::MAX});
  EXPECT_TRUE(mine.equal(most));
}

}  // namespace
}  // namespace lockstep::internal::testing
