// Stages whose parameters are divided over ranks train as one process does:
// every kind of schedule, in memory in common and gathered, with nested units
// and recomputed ones.

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/pipeline/stage_split.h"
#include "lockstep/trace/flight_recorder.h"
#include "tests/harness/free_port.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/harness/temporary_folder.h"
#include "tests/parallel/pipeline/whole_model.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::nn::Sequential;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        norm(register_module(
            "norm", torch::nn::LayerNorm(
                        torch::nn::LayerNormOptions({kWidth}).eps(0.1)))) {
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + norm(torch::tanh(linear(x)));
  }
  torch::nn::Linear linear;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Layer);

// Two layers for each stage.
Sequential whole_layers(int stages) {
  torch::manual_seed(11);
  Sequential model;
  for (int i = 0; i < 2 * stages; ++i) model->push_back(Layer());
  return model;
}

// Two layers of the whole under their names there. The first is a unit of its
// own; the second belongs to the outermost unit.
struct UnitStageImpl : torch::nn::Module {
  UnitStageImpl(const Sequential& whole, int stage,
                const FullyShardOptions& options, bool recomputes_first)
      : first(whole->ptr<LayerImpl>(static_cast<size_t>(2 * stage)),
              inner(options)),
        second(whole->ptr<LayerImpl>(static_cast<size_t>(2 * stage + 1))),
        recomputes(recomputes_first) {
    register_module(std::to_string(2 * stage), first.ptr());
    register_module(std::to_string(2 * stage + 1), second);
  }
  // The outermost unit alone returns another dtype.
  static FullyShardOptions inner(FullyShardOptions options) {
    options.mp_policy.output_dtype.reset();
    return options;
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(
        recomputes
            ? checkpoint([this](const at::Tensor& y) { return first(y); }, x)
            : first(x));
  }
  FullyShard<Layer> first;
  Layer second;
  bool recomputes;
};
using UnitStage = FullyShard<UnitStageImpl>;

// Two pipelines of two ranks, times the replicas of both. Ranks count as
// [replica][pipeline][stage].
struct Groups {
  explicit Groups(const World& world) {
    std::vector<std::vector<int>> pipelines, shards, replicas;
    for (int first = 0; first < world.size; first += 4) {
      pipelines.push_back({first, first + 1});
      pipelines.push_back({first + 2, first + 3});
      shards.push_back({first, first + 2});
      shards.push_back({first + 1, first + 3});
    }
    for (int rank = 0; rank < 4 && world.size == 8; ++rank) {
      replicas.push_back({rank, rank + 4});
    }
    pipeline = new_subgroups_by_enumeration(pipelines);
    options.group = new_subgroups_by_enumeration(shards);
    if (!replicas.empty()) {
      options.replicate_group = new_subgroups_by_enumeration(replicas);
    }
  }
  ProcessGroupPtr pipeline;
  FullyShardOptions options;
};

// The stages of one rank, and their training beside that of one process.
struct ShardedPipeline {
  ShardedPipeline(const Groups& groups, const PipelineSchedule& schedule,
                  bool recomputes = false)
      : stages(check_pipeline_schedule(schedule).stages),
        single(whole_layers(stages)),
        single_optimizer(single->parameters(), options()) {
    const auto facts = check_pipeline_schedule(schedule);
    const Sequential whole = whole_layers(stages);
    for (int stage = 0; stage < stages; ++stage) {
      if (facts.rank_of_stage[static_cast<size_t>(stage)] !=
          groups.pipeline->rank()) {
        continue;
      }
      units.emplace_back(std::make_shared<UnitStageImpl>(
                             whole, stage, groups.options, recomputes),
                         groups.options);
      mine.emplace_back(stage, units.back());
      for (const at::Tensor& parameter : units.back()->parameters()) {
        parameters.push_back(parameter);
      }
    }
    optimizer = std::make_unique<torch::optim::AdamW>(parameters, options());
    pipeline = std::make_unique<Pipeline>(
        mine, PipelineOptions{
                  .schedule = schedule, .loss = mse, .group = groups.pipeline});
  }

  static torch::optim::AdamWOptions options() {
    return torch::optim::AdamWOptions(0.01).weight_decay(0.1);
  }

  // The part of the batch of this rank's pipeline.
  at::Tensor part(const World& world, const at::Tensor& whole) const {
    const int64_t rows = whole.size(0) / (world.size / 2);
    const int64_t begin = world.rank / 2 * rows;
    return whole.slice(0, begin, begin + rows);
  }

  void step(const World& world, int number, int64_t rows) {
    const Batch batch = batch_of(number, rows);
    optimizer->zero_grad();
    single_optimizer.zero_grad();
    pipeline->step(part(world, batch.x), part(world, batch.y));
    mse(single->forward(batch.x), batch.y).backward();
    finish_step();
  }
  void finish_step() {
    const auto norm = clip_grad_norm_(*optimizer, 0.05).item<double>();
    const auto want = clip_grad_norm_(single_optimizer, 0.05).item<double>();
    EXPECT_NEAR(norm, want, kBound);
    EXPECT_GT(want, 0.05);
    optimizer->step();
    single_optimizer.step();
  }

  void expect_equal() const {
    const auto expected = single->named_parameters();
    for (const auto& unit : units) {
      for (const auto& item : unit->named_parameters()) {
        const auto* layout = layout_of(item.value());
        at::Tensor full =
            torch::zeros({layout->box.numel()}, item.value().options());
        full.slice(0, layout->range->begin, layout->range->end)
            .copy_(item.value().detach().view({-1}));
        all_reduce(full, {.group = layout->groups.back()});
        EXPECT_LT(distance(full.view(layout->shape), expected[item.key()]),
                  kBound)
            << item.key();
      }
    }
  }

  int stages;
  Sequential single;
  torch::optim::AdamW single_optimizer;
  std::vector<UnitStage> units;
  std::vector<PipelineStage> mine;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  std::unique_ptr<Pipeline> pipeline;
};

struct ShardedKind {
  const char* name;
  int stages_per_rank;
};
constexpr ShardedKind kShardedKinds[] = {{"GPipe", 1},
                                         {"1F1B", 1},
                                         {"Interleaved1F1B", 2},
                                         {"InterleavedZeroBubble", 1},
                                         {"InterleavedZeroBubble", 2},
                                         {"ZBVZeroBubble", 2}};

struct ShardedPath {
  const char* backend;
  bool shared_memory;
};
constexpr ShardedPath kShardedPaths[] = {
    {"lockstep", true}, {"lockstep", false}, {"gloo", true}};

// PyTorch's FSDP with backwards in two parts is wrong (issue 144530).
WORLD_TEST(PipelineFsdp, EveryScheduleTrainsAsOneProcess, 4) {
  for (const ShardedPath& path : kShardedPaths) {
    SCOPED_TRACE(path.backend);
    SCOPED_TRACE(path.shared_memory);
    auto world_group = init_process_group(path.backend);
    Groups groups(world);
    groups.options.shared_memory = path.shared_memory;
    for (const ShardedKind& kind : kShardedKinds) {
      SCOPED_TRACE(kind.name);
      for (const bool recomputes : {false, true}) {
        ShardedPipeline training(
            groups,
            make_pipeline_schedule(kind.name, 2, 4, kind.stages_per_rank),
            recomputes);
        for (int step = 0; step < 4; ++step) training.step(world, step, 16);
        training.expect_equal();
      }
    }
  }
}

// A bug: a stage that was unsharded by hand kept the values from before the
// first step for ever.
WORLD_TEST(PipelineFsdp, UnshardedStagesHaveTheValuesOfTheLastStep, 4) {
  for (const bool shared_memory : {true, false}) {
    auto world_group = init_process_group();
    Groups groups(world);
    groups.options.shared_memory = shared_memory;
    ShardedPipeline training(groups, schedule_1f1b(2, 4));
    for (auto& unit : training.units) unit.unshard();
    for (int step = 0; step < 3; ++step) training.step(world, step, 16);
    training.expect_equal();
  }
}

WORLD_TEST(PipelineFsdp, ReplicasOfShardsAreAveraged, 8) {
  auto world_group = init_process_group();
  const Groups groups(world);
  ShardedPipeline training(groups, schedule_zbv_zero_bubble(2, 4));
  for (int step = 0; step < 4; ++step) training.step(world, step, 32);
  training.expect_equal();
}

// How often each collective of the group ran since operation `first`, and how
// many elements this rank gave.
std::map<std::string, std::pair<int, uint64_t>> sent_since(
    const ProcessGroupPtr& group, uint64_t first) {
  std::map<std::string, std::pair<int, uint64_t>> sent;
  for (uint64_t id = first + 1; id <= inside(group).flight()->last_id(); ++id) {
    FlightRecord record;
    if (!inside(group).flight()->read(id, record)) continue;
    auto& [calls, elements] = sent[record.call.operation];
    ++calls;
    elements += record.call.in_elements;
  }
  return sent;
}

// Whatever the number of micro-batches.
WORLD_TEST(PipelineFsdp, AStepSendsParametersAndGradientsOnce, 4) {
  auto world_group = init_process_group("gloo");
  const Groups groups(world);
  for (const int micro_batches : {4, 16}) {
    ShardedPipeline training(
        groups, schedule_interleaved_zero_bubble(2, micro_batches, 1));
    training.step(world, 0, 64);
    const uint64_t before = inside(groups.options.group).flight()->last_id();
    const Batch batch = batch_of(1, 64);
    training.pipeline->step(training.part(world, batch.x),
                            training.part(world, batch.y));
    const auto sent = sent_since(groups.options.group, before);
    // Two units, each of 40 elements in four parameters; each parameter begins
    // on a cache line of 8 elements. The third gather compares what the ranks
    // have done and used.
    using Sent = std::pair<int, uint64_t>;
    EXPECT_THAT(
        sent,
        ::testing::UnorderedElementsAre(
            ::testing::Pair("all_gather_into_tensor", Sent(3, 2 * 32 + 3)),
            ::testing::Pair("reduce_scatter_tensor", Sent(2, 2 * 64))));
  }
}

// Steps add to gradients, with and without no_sync(), and eval() may come
// between.
WORLD_TEST(PipelineFsdp, GradientsOfSeveralStepsAdd, 4) {
  for (const bool shared_memory : {true, false}) {
    for (const bool local : {false, true}) {
      auto world_group = init_process_group();
      Groups groups(world);
      groups.options.shared_memory = shared_memory;
      ShardedPipeline training(groups,
                               schedule_interleaved_zero_bubble(2, 4, 2));
      for (int step = 0; step < 3; ++step) {
        training.optimizer->zero_grad();
        training.single_optimizer.zero_grad();
        for (int part = 0; part < 2; ++part) {
          const Batch batch = batch_of(2 * step + part, 16);
          const at::Tensor x = training.part(world, batch.x);
          const at::Tensor y = training.part(world, batch.y);
          for (UnitStage& unit : training.units) {
            unit.set_requires_gradient_sync(!local || part == 1);
          }
          training.pipeline->step(x, y);
          const auto eval = training.pipeline->eval(x, y);
          const at::Tensor output = training.single->forward(batch.x);
          if (eval.loss.defined()) {
            EXPECT_LT(distance(eval.outputs.at(0),
                               training.part(world, output.detach())),
                      kBound);
          }
          mse(output, batch.y).backward();
        }
        training.finish_step();
      }
      training.expect_equal();
    }
  }
}

// Frozen parameters may change, and a unit works by itself between steps.
WORLD_TEST(PipelineFsdp, FrozenParametersGetNoGradient, 4) {
  auto world_group = init_process_group();
  const Groups groups(world);
  ShardedPipeline training(groups, schedule_zbv_zero_bubble(2, 4));
  const auto freeze = [](torch::nn::Module& module, bool frozen) {
    for (auto& item : module.named_parameters()) {
      if (item.key().ends_with("linear.bias") || item.key().starts_with("0.")) {
        item.value().set_requires_grad(!frozen);
      }
    }
  };
  for (int step = 0; step < 4; ++step) {
    freeze(*training.single, step == 2);
    for (UnitStage& unit : training.units) freeze(*unit.ptr(), step == 2);
    training.step(world, step, 16);
    for (const at::Tensor& parameter : training.parameters) {
      EXPECT_EQ(parameter.grad().defined(), parameter.requires_grad());
    }
    for (UnitStage& unit : training.units) {
      const torch::NoGradGuard no_grad;
      unit(torch::zeros({1, kWidth}, torch::kDouble));
    }
  }
  training.expect_equal();
}

WORLD_TEST(PipelineFsdp, AFolderOfASnapshotLoadsIntoOneProcess, 4) {
  TemporaryFolder folder;
  auto world_group = init_process_group();
  const std::string path =
      broadcast_object(folder.path()).get<std::string>() + "/snapshots/";
  const Groups groups(world);
  ShardedPipeline training(groups, schedule_zbv_zero_bubble(2, 4));
  for (int step = 0; step < 2; ++step) training.step(world, step, 16);
  // A module of this rank's stages, under the names that they have.
  auto all = std::make_shared<torch::nn::Module>();
  for (const UnitStage& unit : training.units) {
    for (const auto& child : unit->named_children()) {
      all->register_module(child.key(), child.value());
    }
  }
  save_snapshot(path, {.model = all, .optimizer = training.optimizer.get()});
  training.step(world, 2, 16);
  {
    Sequential loaded = whole_layers(training.stages);
    torch::optim::AdamW optimizer(loaded->parameters(),
                                  ShardedPipeline::options());
    TrainingState state{.model = loaded.ptr(), .optimizer = &optimizer};
    ASSERT_TRUE(load_snapshot(path, state));
    const Batch batch = batch_of(2, 16);
    mse(loaded->forward(batch.x), batch.y).backward();
    clip_grad_norm_(optimizer, 0.05);
    optimizer.step();
    for (const auto& item : training.single->named_parameters()) {
      EXPECT_LT(distance(loaded->named_parameters()[item.key()], item.value()),
                kBound)
          << item.key();
    }
  }
  barrier();
}

// Gradients of micro-batches add up in reduce_dtype: in bfloat16 a sum of many
// small ones would stay where it is.
WORLD_TEST(PipelineFsdp, GradientsAddUpInTheDtypeOfReductions, 4) {
  auto world_group = init_process_group();
  Groups groups(world);
  groups.options.mp_policy = {.param_dtype = at::kBFloat16,
                              .reduce_dtype = at::kDouble,
                              .output_dtype = at::kDouble};
  for (const bool zero_bubble : {false, true}) {
    const auto schedule = zero_bubble
                              ? schedule_interleaved_zero_bubble(2, 64, 1)
                              : schedule_gpipe(2, 64);
    ShardedPipeline training(groups, schedule);
    const Batch batch = batch_of(0, 2);
    // 64 equal micro-batches on each rank.
    const auto half = batch.x.slice(0, world.rank / 2, world.rank / 2 + 1);
    const auto want = batch.y.slice(0, world.rank / 2, world.rank / 2 + 1);
    training.pipeline->step(half.repeat({64, 1}), want.repeat({64, 1}));
    std::vector<at::Tensor> many;
    for (const at::Tensor& parameter : training.parameters) {
      many.push_back(parameter.grad().clone());
    }
    ShardedPipeline few(groups, zero_bubble
                                    ? schedule_interleaved_zero_bubble(2, 2, 1)
                                    : schedule_gpipe(2, 2));
    few.pipeline->step(half.repeat({2, 1}), want.repeat({2, 1}));
    for (size_t i = 0; i < many.size(); ++i) {
      const at::Tensor& once = few.parameters[i].grad();
      if (once.numel() == 0) continue;
      // The scale 1 / 64 is exact, so the sums are.
      EXPECT_LT(distance(many[i], once), 1e-12);
    }
  }
}

// The embedding of the first stage is the output layer of the last.
struct UnitEmbedImpl : torch::nn::Module {
  UnitEmbedImpl()
      : weight(register_parameter("weight",
                                  torch::randn({7, kWidth}, torch::kDouble))),
        bias(register_parameter("bias", torch::zeros(kWidth, torch::kDouble))) {
  }
  at::Tensor forward(const at::Tensor& ids) {
    return torch::tanh(torch::embedding(weight, ids) + bias);
  }
  at::Tensor weight, bias;
};
struct UnitHeadImpl : torch::nn::Module {
  UnitHeadImpl()
      : scale(register_parameter("scale", torch::ones({}, torch::kDouble))),
        weight(register_parameter("weight",
                                  torch::randn({7, kWidth}, torch::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(scale * x, weight);
  }
  at::Tensor scale, weight;
};

WORLD_TEST(PipelineFsdp, TiedWeightsAreSummedBeforeTheyAreDivided, 4) {
  const auto entropy = [](const at::Tensor& logits, const at::Tensor& target) {
    return torch::cross_entropy_loss(logits, target);
  };
  for (const bool shared_memory : {true, false}) {
    auto world_group = init_process_group();
    Groups groups(world);
    groups.options.shared_memory = shared_memory;
    torch::manual_seed(3);
    auto embed = std::make_shared<UnitEmbedImpl>();
    auto head = std::make_shared<UnitHeadImpl>();
    std::vector<at::Tensor> all{embed->weight.detach().clone().requires_grad_(),
                                embed->bias.detach().clone().requires_grad_(),
                                head->scale.detach().clone().requires_grad_()};
    const bool first = groups.pipeline->rank() == 0;
    const PipelineStage stage =
        first ? PipelineStage(0, FullyShard(embed, groups.options))
              : PipelineStage(1, FullyShard(head, groups.options));
    Pipeline pipeline({stage},
                      {.schedule = schedule_interleaved_zero_bubble(2, 4, 1),
                       .loss = entropy,
                       .tied_weights = {{{{0, "weight"}, {1, "weight"}}}},
                       .group = groups.pipeline});
    torch::optim::AdamW optimizer(stage.module().parameters(),
                                  ShardedPipeline::options());
    torch::optim::AdamW single_optimizer(all, ShardedPipeline::options());
    for (int step = 0; step < 4; ++step) {
      torch::manual_seed(step);
      const at::Tensor ids = torch::randint(7, {16});
      const at::Tensor next = torch::randint(7, {16});
      optimizer.zero_grad();
      single_optimizer.zero_grad();
      const int64_t begin = world.rank / 2 * 8;
      pipeline.step(ids.slice(0, begin, begin + 8),
                    next.slice(0, begin, begin + 8));
      const auto x = torch::tanh(torch::embedding(all[0], ids) + all[1]);
      entropy(torch::linear(all[2] * x, all[0]), next).backward();
      EXPECT_NEAR(clip_grad_norm_(optimizer, 0.2).item<double>(),
                  clip_grad_norm_(single_optimizer, 0.2).item<double>(),
                  kBound);
      optimizer.step();
      single_optimizer.step();
    }
    for (const auto& item : stage.module().named_parameters()) {
      const auto* layout = layout_of(item.value());
      const at::Tensor& whole = item.key() == "weight" ? all[0]
                                : item.key() == "bias" ? all[1]
                                                       : all[2];
      const at::Tensor want = whole.detach().view({-1}).slice(
          0, layout->range->begin, layout->range->end);
      if (want.numel() == 0) continue;
      EXPECT_LT(distance(item.value().view({-1}), want), kBound) << item.key();
      EXPECT_EQ(layout->duplicate, !first && item.key() == "weight");
    }
  }
}

// Both stages have the weight under one name, but the weight begins in the flat
// tensor of the first and ends in that of the second, so their ranks have other
// elements of it: the parts in a snapshot overlapped.
WORLD_TEST(PipelineFsdp, ATiedWeightThatStagesDivideDifferentlyIsSavedOnce, 4) {
  const auto entropy = [](const at::Tensor& logits, const at::Tensor& target) {
    return torch::cross_entropy_loss(logits, target);
  };
  auto world_group = init_process_group();
  const Groups groups(world);
  for (const int first_holder : {0, 1}) {
    torch::manual_seed(3);
    auto embed = std::make_shared<UnitEmbedImpl>();
    auto head = std::make_shared<UnitHeadImpl>();
    const bool first = groups.pipeline->rank() == 0;
    const PipelineStage stage =
        first ? PipelineStage(0, FullyShard(embed, groups.options))
              : PipelineStage(1, FullyShard(head, groups.options));
    Pipeline pipeline({stage},
                      {.schedule = schedule_1f1b(2, 2),
                       .loss = entropy,
                       .tied_weights = {{{{first_holder, "weight"},
                                          {1 - first_holder, "weight"}}}},
                       .group = groups.pipeline});
    torch::optim::AdamW optimizer(stage.module().parameters(),
                                  ShardedPipeline::options());
    torch::manual_seed(7);
    const at::Tensor ids = torch::randint(7, {8});
    pipeline.step(ids, ids);
    optimizer.step();
    const auto holder =
        first ? std::static_pointer_cast<torch::nn::Module>(embed) : head;
    TrainingState state{.model = holder, .optimizer = &optimizer};
    const std::string path =
        (world.folder / std::to_string(first_holder)).string() + "/";
    save_snapshot(path, state);
    const NamedTensors full = full_state_dict(*holder);
    EXPECT_EQ(full.size(), world.rank == 0 ? 3 : 0);

    // One process has the parameters of both, and steps on from there as the
    // stages do.
    auto whole = std::make_shared<torch::nn::Module>();
    for (const char* name : {"weight", "bias", "scale"}) {
      Sizes shape;
      if (name == std::string("weight")) shape = {7, kWidth};
      if (name == std::string("bias")) shape = {kWidth};
      whole->register_parameter(name, torch::zeros(shape, torch::kDouble));
    }
    torch::optim::AdamW other(whole->parameters(), ShardedPipeline::options());
    TrainingState loaded{.model = whole, .optimizer = &other};
    EXPECT_TRUE(load_snapshot(path, loaded));
    for (const auto& [name, tensor] : full) {
      EXPECT_TRUE(tensor.equal(whole->named_parameters()[name])) << name;
    }
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : holder->parameters()) parameter.zero_();
    }
    EXPECT_TRUE(load_snapshot(path, state));
    for (auto* one : {&optimizer, &other}) {
      for (auto& parameter : one->param_groups()[0].params()) {
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
      one->step();
    }
    for (const auto& item : holder->named_parameters()) {
      const at::Tensor want =
          part_of(whole->named_parameters()[item.key()].detach(),
                  *layout_of(item.value()));
      if (want.numel() == 0) continue;
      EXPECT_LT(distance(item.value(), want), kBound) << item.key();
    }
  }
}

// A stage that has nothing to train.
struct ScaleImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * 2; }
};

WORLD_TEST(PipelineFsdp, AStageWithoutParametersTakesPartInClipping, 4) {
  auto world_group = init_process_group();
  const Groups groups(world);
  const bool first = groups.pipeline->rank() == 0;
  torch::manual_seed(5);
  auto layer = std::make_shared<LayerImpl>();
  torch::manual_seed(5);
  const auto single = std::make_shared<LayerImpl>();
  const PipelineStage stage =
      first ? PipelineStage(0, FullyShard(layer, groups.options))
            : PipelineStage(1, std::make_shared<ScaleImpl>());
  Pipeline pipeline(
      {stage},
      {.schedule = schedule_1f1b(2, 4), .loss = mse, .group = groups.pipeline});
  const Batch batch = batch_of(0, 16);
  const int64_t begin = world.rank / 2 * 8;
  pipeline.step(batch.x.slice(0, begin, begin + 8),
                batch.y.slice(0, begin, begin + 8));
  mse(single->forward(batch.x) * 2, batch.y).backward();
  auto parameters = stage.module().parameters();
  EXPECT_EQ(parameters.empty(), !first);
  if (parameters.empty()) parameters = {pipeline.empty_parameter()};
  EXPECT_NEAR(clip_grad_norm_(parameters, 0.1).item<double>(),
              clip_grad_norm_(single->parameters(), 0.1).item<double>(),
              kBound);
}

// The unit's inputs could not be changed in place, either.
WORLD_TEST(PipelineFsdp, StagesMayChangeTheirInputsInPlace, 4) {
  auto world_group = init_process_group();
  const Groups groups(world);
  const PipelineSchedule schedule = schedule_interleaved_zero_bubble(2, 4, 1);
  const auto make = [] {
    torch::manual_seed(5);
    const torch::nn::ReLU relu(torch::nn::ReLUOptions(/*inplace=*/true));
    return Sequential(relu, Layer(), relu, Layer());
  };
  const Sequential single = make();
  const int index = groups.pipeline->rank();
  const Sequential part = stage_of(make(), {0, 2}, index);
  const FullyShard<Sequential> unit(part, groups.options);
  Pipeline pipeline(
      {PipelineStage(index, unit)},
      {.schedule = schedule, .loss = mse, .group = groups.pipeline});
  torch::optim::SGD optimizer(unit->parameters(), 0.1);
  torch::optim::SGD single_optimizer(single->parameters(), 0.1);
  const Batch batch = batch_of(0, 16);
  const int64_t begin = world.rank / 2 * 8;
  const auto x = batch.x.clone().slice(0, begin, begin + 8);
  pipeline.step(x, batch.y.slice(0, begin, begin + 8));
  Sequential whole = single;
  mse(whole->forward(batch.x), batch.y).backward();
  optimizer.step();
  single_optimizer.step();
  for (const auto& item : unit->named_parameters()) {
    const at::Tensor want =
        part_of(single->named_parameters()[item.key()].detach(),
                *layout_of(item.value()));
    if (want.numel() == 0) continue;
    EXPECT_LT(distance(item.value(), want), kBound) << item.key();
  }
}

// Throws in its second forward.
struct UnluckyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (++forwards == 2) throw std::range_error("out of luck");
    return x * 2;
  }
  int forwards = 0;
};

// The group's timeout is far away.
WORLD_TEST(PipelineFsdp, AFailureEndsAllReplicasOfThePipeline, 4) {
  auto world_group = init_process_group();
  const Groups groups(world);
  torch::manual_seed(5);
  auto stage_module = torch::nn::Sequential(Layer());
  if (world.rank == 1) stage_module->push_back(UnluckyImpl());
  const PipelineStage stage(groups.pipeline->rank(),
                            FullyShard(stage_module, groups.options));
  Pipeline pipeline(
      {stage},
      {.schedule = schedule_1f1b(2, 4), .loss = mse, .group = groups.pipeline});
  const Batch batch = batch_of(0, 8);
  const std::string message =
      message_of([&] { pipeline.step(batch.x, batch.y); });
  if (world.rank == 1) {
    EXPECT_EQ(message, "out of luck");
  } else {
    EXPECT_THAT(message, HasSubstr("rank 1 failed in 1F1 (stage 1, "
                                   "micro-batch 1): out of luck"));
  }
}

// Kills its process in its second forward.
struct DeadlyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (++forwards == 2) ::raise(SIGKILL);
    return x * 2;
  }
  int forwards = 0;
};

// One rank of a pipeline of three; writes what its step() throws.
int step_with_a_victim(const std::string& folder, const char* backend, int rank,
                       int victim) {
  ::alarm(50);
  ::setenv("LOCKSTEP_FLIGHT_DIR", folder.c_str(), /*replace=*/1);
  auto group = init_process_group(
      backend,
      {.timeout = std::chrono::minutes(5),
       .world_size = 3,
       .rank = rank,
       .store = c10::make_intrusive<c10d::FileStore>(folder + "/store", 3)});
  Sequential stage{Layer()};
  if (rank == victim) stage->push_back(DeadlyImpl());
  Pipeline pipeline({{rank, stage}},
                    {.schedule = schedule_1f1b(3, 6), .loss = mse});
  const Batch batch = batch_of(0, 12);
  write_file(folder + "/" + std::to_string(rank),
             message_of([&] { pipeline.step(batch.x, batch.y); }));
  return 0;
}

// Also by ranks that exchange no messages with it, long before the deadline.
TEST(PipelineFaults, ARankThatIsKilledInStepIsNamedByAllOthers) {
  for (const char* backend : {"lockstep", "gloo"}) {
    for (const int victim : {0, 1, 2}) {
      SCOPED_TRACE(std::string(backend) + " " + std::to_string(victim));
      const TemporaryFolder folder;
      std::vector<pid_t> ranks;
      for (int rank = 0; rank < 3; ++rank) {
        ranks.push_back(::fork());
        if (ranks.back() != 0) continue;
        int code = 1;
        try {
          code = step_with_a_victim(folder.path(), backend, rank, victim);
        } catch (...) {
        }
        ::_exit(code);
      }
      for (int rank = 0; rank < 3; ++rank) {
        int status = 0;
        ::waitpid(ranks[static_cast<size_t>(rank)], &status, 0);
        if (rank == victim) {
          EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
          continue;
        }
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << rank;
        EXPECT_THAT(read_file(folder.path() + "/" + std::to_string(rank)),
                    HasSubstr("rank " + std::to_string(victim) + " died"));
      }
    }
  }
}

// Fails in its second forward, as `how` says.
struct FailsLaterImpl : torch::nn::Module {
  explicit FailsLaterImpl(std::string how) : how_(std::move(how)) {}
  at::Tensor forward(const at::Tensor& x) {
    if (++forwards_ != 2) return x * 2;
    if (how_ == "kill") ::raise(SIGKILL);
    TORCH_CHECK(how_ != "c10::Error", "out of luck");
    throw std::range_error("out of luck");
  }

 private:
  std::string how_;
  int forwards_ = 0;
};
TORCH_MODULE(FailsLater);

// One rank of a pipeline of four, which ends as soon as its step() has thrown:
// with its process, or else its group. The store goes with rank 0.
int end_after_step(const std::string& folder, int port, int rank, int victim,
                   const std::string& how, bool unwinds) {
  ::alarm(50);
  ::setenv("LOCKSTEP_FLIGHT_DIR", folder.c_str(), /*replace=*/1);
  try {
    auto group = init_process_group(
        "lockstep", {.init_method = "tcp://127.0.0.1:" + std::to_string(port),
                     .timeout = std::chrono::minutes(5),
                     .world_size = 4,
                     .rank = rank});
    Sequential stage{Layer()};
    if (rank == victim) stage->push_back(FailsLater(how));
    Pipeline pipeline({{rank, stage}},
                      {.schedule = schedule_1f1b(4, 8), .loss = mse});
    const Batch batch = batch_of(0, 16);
    try {
      pipeline.step(batch.x, batch.y);
    } catch (const std::exception& error) {
      write_file(folder + "/" + std::to_string(rank), error.what());
      if (!unwinds) ::_exit(0);
      throw;
    }
  } catch (const std::exception&) {
    return 0;
  }
  return 1;
}

// Ranks that are not neighbours of the first that fails hear of it from others,
// which may be gone, and the store with them.
void expect_that_all_name_the_first(const std::string& how) {
  for (const bool unwinds : {false, true}) {
    for (const int victim : {0, 1, 3}) {
      SCOPED_TRACE(std::to_string(victim) + (unwinds ? ", unwinds" : ""));
      const TemporaryFolder folder;
      const int port = free_port();
      std::vector<pid_t> ranks;
      for (int rank = 0; rank < 4; ++rank) {
        ranks.push_back(::fork());
        if (ranks.back() != 0) continue;
        ::_exit(
            end_after_step(folder.path(), port, rank, victim, how, unwinds));
      }
      const std::string first = "rank " + std::to_string(victim);
      for (int rank = 0; rank < 4; ++rank) {
        int status = 0;
        ::waitpid(ranks[static_cast<size_t>(rank)], &status, 0);
        if (rank == victim) continue;
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << rank;
        const std::string text =
            read_file(folder.path() + "/" + std::to_string(rank));
        if (how == "kill") {
          EXPECT_THAT(text, HasSubstr(first + " died"));
        } else {
          EXPECT_THAT(text, HasSubstr("pipeline: " + first + " failed in " +
                                      std::to_string(victim) + "F1 (stage " +
                                      std::to_string(victim) +
                                      ", micro-batch 1): out of luck"));
          // Only this rank's own error ends with a backtrace.
          EXPECT_THAT(text, ContainsRegex(
                                "out of luck(: a message| .noticed by rank)"));
        }
        for (int other = 0; other < 4; ++other) {
          if (other == victim) continue;
          const std::string name = "rank " + std::to_string(other);
          EXPECT_THAT(text, Not(HasSubstr(name + " died")));
          EXPECT_THAT(text, Not(HasSubstr(name + " failed:")));
          EXPECT_THAT(text, Not(HasSubstr(name + " failed in")));
        }
      }
    }
  }
}

TEST(PipelineFaults, AllNameTheFirstRankThatDied) {
  expect_that_all_name_the_first("kill");
}
TEST(PipelineFaults, AllNameTheFirstStageThatThrew) {
  expect_that_all_name_the_first("exception");
}
TEST(PipelineFaults, AllGetTheWordsOfATorchErrorWithoutItsBacktrace) {
  expect_that_all_name_the_first("c10::Error");
}

// The new layer's parameters were neither divided nor averaged.
WORLD_TEST(PipelineFsdp, ALayerThatIsAddedToADividedStageIsNamed, 4) {
  auto group = init_process_group();
  const Groups groups(world);
  ShardedPipeline run(groups, schedule_1f1b(2, 2));
  run.step(world, 0, 8);
  run.units[0].module()->register_module("more", Layer());
  EXPECT_THAT(message_of([&] { run.step(world, 1, 8); }),
              HasSubstr("'more.linear.weight' of ["));
}

WORLD_TEST(PipelineFsdp, StagesThatCannotBeAreRefused, 1) {
  auto group = init_process_group();
  const Sequential whole = whole_layers(2);
  const auto stage =
      std::make_shared<UnitStageImpl>(whole, 0, FullyShardOptions{}, false);
  EXPECT_THAT(message_of([&] { PipelineStage(1, stage); }),
              HasSubstr("parameter 0.linear.weight in a FullyShard; make a "
                        "FullyShard of the whole module"));
  const UnitStage unit(stage);
  EXPECT_THAT(message_of([&] { PipelineStage(1, stage->first); }),
              HasSubstr("give the outermost unit"));
}

}  // namespace
}  // namespace lockstep::internal::testing
