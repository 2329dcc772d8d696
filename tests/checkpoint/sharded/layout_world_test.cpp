// Snapshots of models whose parameters are divided over ranks, by layouts that
// are made by hand.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;
using ::testing::SizeIs;
using testing::World;

const std::map<std::string, Sizes> kShapes{
    {"matrix", {6, 5}}, {"cube", {4, 3, 5}}, {"plain", {3}}, {"vector", {7}}};
// The shapes of parameters that only some tests have.
const std::map<std::string, Sizes> kSmallShapes{{"empty", {0, 3}},
                                                {"single", {1}}};

const Sizes& shape_of(const std::string& name) {
  const auto found = kSmallShapes.find(name);
  return found != kSmallShapes.end() ? found->second : kShapes.at(name);
}

// The whole tensor `what` ("value", "exp_avg", "exp_avg_sq") of a parameter:
// numbers that differ everywhere.
at::Tensor whole_of(const std::string& name, const std::string& what) {
  const Sizes& shape = shape_of(name);
  const auto first =
      static_cast<double>(name.size() * 1000 + what.size() * 100);
  return torch::arange(numel_of(shape), torch::kDouble).add(first).view(shape);
}

// How a rank's parameters are divided. Returns a layout without a shape, or
// none.
using Division = std::function<std::optional<TensorLayout>(const Sizes&)>;

Division undivided() {
  return [](const Sizes&) { return std::nullopt; };
}

// Rows over the group, or elements.
Division rows_over(const ProcessGroupPtr& group) {
  return [group](const Sizes& shape) -> std::optional<TensorLayout> {
    return TensorLayout{
        .box = chunk_box(shape, 0, group->rank(), group->size()),
        .groups = {group}};
  };
}

Division elements_over(const ProcessGroupPtr& group) {
  return [group](const Sizes& shape) -> std::optional<TensorLayout> {
    const int64_t count = numel_of(shape);
    return TensorLayout{
        .box = whole_box(shape),
        .range = Range{count * group->rank() / group->size(),
                       count * (group->rank() + 1) / group->size()},
        .groups = {group}};
  };
}

// The last dimension over one group, and the elements of each part over the
// other.
Division both_over(const ProcessGroupPtr& tensor,
                   const ProcessGroupPtr& shard) {
  return [=](const Sizes& shape) -> std::optional<TensorLayout> {
    TensorLayout layout{.box = chunk_box(shape, shape.size() - 1,
                                         tensor->rank(), tensor->size()),
                        .groups = {tensor, shard}};
    const int64_t count = layout.box.numel();
    layout.range = Range{count * shard->rank() / shard->size(),
                         count * (shard->rank() + 1) / shard->size()};
    return layout;
  };
}

// A model with some of the parameters, its optimizer, and their state.
struct DividedRun {
  std::shared_ptr<torch::nn::Module> model =
      std::make_shared<torch::nn::Module>();
  std::optional<torch::optim::AdamW> optimizer;
  TrainingState state;

  explicit DividedRun(const Division& division,
                      const std::set<std::string>& names = {
                          "matrix", "cube", "plain", "vector"}) {
    for (const std::string& name : names) {
      auto tensor = whole_of(name, "value");
      auto layout = division(shape_of(name));
      // One parameter is the same on all ranks.
      if (name == "plain") layout.reset();
      if (layout) {
        layout->shape = shape_of(name);
        tensor = part_of(tensor, *layout);
      }
      tensor = tensor.clone();
      auto& parameter = model->register_parameter(name, tensor);
      if (layout) set_layout(parameter, *layout);
    }
    model->register_buffer("buffer_of_" + *names.begin(),
                           torch::full({2}, 4.0));
    optimizer.emplace(model->parameters());
    state.model = model;
    state.optimizer = &*optimizer;
  }

  // Gives the optimizer its state.
  void step(int64_t times) {
    for (auto& item : model->named_parameters()) {
      auto& parameter = item.value();
      auto own = std::make_unique<torch::optim::AdamWParamState>();
      own->step(times);
      own->exp_avg(expected(item.key(), "exp_avg"));
      own->exp_avg_sq(expected(item.key(), "exp_avg_sq"));
      optimizer->state()[parameter.unsafeGetTensorImpl()] = std::move(own);
    }
    state.step = times;
  }

  at::Tensor expected(const std::string& name, const std::string& what) const {
    const auto whole = whole_of(name, what);
    const auto* layout = layout_of(model->named_parameters()[name]);
    return layout ? part_of(whole, *layout).clone() : whole;
  }

  void clear() {
    const torch::NoGradGuard no_grad;
    for (auto& tensor : model->parameters()) tensor.fill_(-1);
    for (auto& tensor : model->buffers()) tensor.fill_(-1);
  }

  void expect_loaded(int64_t times) {
    for (auto& item : model->named_parameters()) {
      const std::string& name = item.key();
      EXPECT_TRUE(item.value().equal(expected(name, "value"))) << name;
      const auto found =
          optimizer->state().find(item.value().unsafeGetTensorImpl());
      ASSERT_NE(found, optimizer->state().end()) << name;
      const auto& own =
          static_cast<const torch::optim::AdamWParamState&>(*found->second);
      EXPECT_EQ(own.step(), times);
      EXPECT_TRUE(own.exp_avg().equal(expected(name, "exp_avg"))) << name;
      EXPECT_TRUE(own.exp_avg_sq().equal(expected(name, "exp_avg_sq"))) << name;
    }
    for (const auto& buffer : model->buffers()) {
      EXPECT_TRUE(buffer.eq(4).all().item<bool>());
    }
    EXPECT_EQ(state.step, times);
  }
};

// The ranks that save or load together, with a division of theirs.
struct Way {
  std::string name;
  ProcessGroupPtr group;  // null if this rank is not in it
  Division division;
};

std::vector<Way> ways_of(const World& world) {
  const auto alone = new_group({0});
  const auto all = new_group();
  std::vector<Way> ways{{"alone", alone, undivided()},
                        {"replicas", all, undivided()},
                        {"rows", all, rows_over(all)},
                        {"elements", all, elements_over(all)}};
  if (world.size > 2) {
    const auto pair = new_group({0, 1});
    ways.push_back({"pair", pair, elements_over(pair)});
  }
  if (world.size == 4) {
    const auto tensor = new_subgroups(2);
    const auto shard = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
    ways.push_back({"both", all, both_over(tensor, shard)});
    // Two pairs that have the same.
    ways.push_back({"hybrid", all, elements_over(tensor)});
  }
  return ways;
}

WORLD_TEST(LayoutSnapshot, AnyDivisionLoadsWhatAnyOtherHasSaved, 1, 2, 3, 4) {
  auto group = init_process_group("gloo");
  const auto ways = ways_of(world);
  for (const Way& by : ways) {
    const std::string path = (world.folder / by.name).string() + "/";
    if (by.group) {
      DividedRun run(by.division);
      run.step(5);
      save_snapshot(path, run.state, {.group = by.group});
    }
    barrier();
    for (const Way& with : ways) {
      if (!with.group) continue;
      SCOPED_TRACE(by.name + " loaded as " + with.name);
      DividedRun run(with.division);
      run.clear();
      EXPECT_TRUE(load_snapshot(path, run.state, {.group = with.group}));
      run.expect_loaded(5);
    }
    barrier();
    if (world.rank == 0) {
      // Each element was written once, under the name and shape of the whole.
      const TensorFiles files = TensorFiles::open_folder(path + "latest");
      for (const auto& [name, shape] : kShapes) {
        EXPECT_EQ(files.tensors().at("model." + name).shape, shape);
        EXPECT_TRUE(
            read_tensor(files, "model." + name).equal(whole_of(name, "value")));
        EXPECT_TRUE(read_tensor(files, "optimizer.state." + name + ".exp_avg")
                        .equal(whole_of(name, "exp_avg")));
      }
    }
  }
}

// The stages of a pipeline: each of two halves of the ranks has some of the
// parameters.
struct PipelineStages {
  ProcessGroupPtr pipeline;
  ProcessGroupPtr inner;
  bool first;

  explicit PipelineStages(const World& world)
      : first(world.rank < world.size / 2) {
    const int half = world.size / 2;
    std::vector<std::vector<int>> ranks;
    for (int r = 0; r < half; ++r) ranks.push_back({r, r + half});
    pipeline = new_subgroups_by_enumeration(ranks);
    inner = new_subgroups(half);
  }

  std::set<std::string> names() const {
    return first ? std::set<std::string>{"cube", "plain"}
                 : std::set<std::string>{"matrix", "vector"};
  }
  Division division() const {
    return [this](const Sizes& shape) {
      auto layout = elements_over(inner)(shape);
      layout->groups.insert(layout->groups.begin(), pipeline);
      return layout;
    };
  }
};

WORLD_TEST(LayoutSnapshot, StagesOfAPipelineHaveOneSnapshot, 2, 4) {
  auto group = init_process_group("gloo");
  const auto alone = new_group({0});
  const PipelineStages stages(world);
  const std::string path = (world.folder / "stages").string() + "/";
  DividedRun saved(stages.division(), stages.names());
  saved.step(3);
  save_snapshot(path, saved.state);
  {
    DividedRun run(stages.division(), stages.names());
    run.clear();
    EXPECT_TRUE(load_snapshot(path, run.state));
    run.expect_loaded(3);
  }
  // One process, and back.
  const std::string whole = (world.folder / "whole").string() + "/";
  if (alone) {
    DividedRun run(undivided());
    run.model->register_buffer("buffer_of_matrix", torch::full({2}, 4.0));
    run.clear();
    EXPECT_TRUE(load_snapshot(path, run.state, {.group = alone}));
    run.expect_loaded(3);
    save_snapshot(whole, run.state, {.group = alone});
  }
  barrier();
  DividedRun run(stages.division(), stages.names());
  run.clear();
  EXPECT_TRUE(load_snapshot(whole, run.state));
  run.expect_loaded(3);
}

// One process ties two parameters, two stages have one each.
WORLD_TEST(LayoutSnapshot, TiedStagesLoadWhatOneProcessSavedAndBack, 2) {
  auto group = init_process_group("gloo");
  const auto alone = new_group({0});
  const std::string path = (world.folder / "tied").string() + "/";
  const auto weight = [](double value) {
    return torch::full({3, 2}, value, torch::kDouble);
  };
  const auto moments = [](torch::optim::AdamW& optimizer) -> at::Tensor& {
    auto& own =
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(
            optimizer.param_groups()[0].params()[0].unsafeGetTensorImpl()));
    return own.exp_avg();
  };
  const auto both = [&](double value) {
    auto model = std::make_shared<torch::nn::Module>();
    const auto tied = model->register_parameter("embed", weight(value));
    model->register_parameter("head", tied);
    return model;
  };
  const auto stepped = [](const std::shared_ptr<torch::nn::Module>& model) {
    auto parameter = model->parameters()[0];
    auto optimizer = std::make_unique<torch::optim::AdamW>(
        std::vector<at::Tensor>{parameter});
    parameter.mutable_grad() = torch::full_like(parameter, 3.0);
    optimizer->step();
    return optimizer;
  };
  const auto half = std::make_shared<torch::nn::Module>();
  auto& parameter =
      half->register_parameter(world.rank == 0 ? "embed" : "head", weight(0));
  set_layout(parameter, {.shape = {3, 2},
                         .box = whole_box({3, 2}),
                         .groups = {group.get()},
                         .duplicate = world.rank == 1});
  const auto expected = both(5);
  const auto expected_optimizer = stepped(expected);
  if (alone) {
    save_snapshot(path,
                  {.model = expected, .optimizer = expected_optimizer.get()},
                  {.group = alone});
  }
  barrier();
  torch::optim::AdamW optimizer(half->parameters());
  TrainingState state{.model = half, .optimizer = &optimizer};
  EXPECT_TRUE(load_snapshot(path, state));
  EXPECT_TRUE(parameter.equal(expected->parameters()[0]));
  EXPECT_TRUE(moments(optimizer).equal(moments(*expected_optimizer)));
  save_snapshot(path, state);
  if (!alone) return;
  const auto loaded = both(0);
  torch::optim::AdamW other({loaded->parameters()[0]});
  TrainingState whole{.model = loaded, .optimizer = &other};
  EXPECT_EQ(load_snapshot(path, whole, {.group = alone}).path,
            path + "000002-step-0");
  EXPECT_TRUE(loaded->parameters()[0].equal(expected->parameters()[0]));
  EXPECT_TRUE(moments(other).equal(moments(*expected_optimizer)));
}

// A parameter of another stage is not an error, but a parameter that no rank
// has is one, and so is one that the snapshot lacks.
WORLD_TEST(LayoutSnapshot, WhatNoStageHasIsAnErrorOnAllRanks, 2) {
  auto group = init_process_group("gloo");
  const PipelineStages stages(world);
  const std::string path = (world.folder / "missing").string() + "/";
  DividedRun saved(stages.division(), stages.names());
  saved.step(3);
  save_snapshot(path, saved.state);
  const auto refusal = [&](std::set<std::string> names, bool with_optimizer) {
    DividedRun run(stages.division(), names);
    if (!with_optimizer) run.state.optimizer = nullptr;
    return message_of(
        [&] { load_snapshot(path, run.state, {.will_save = false}); });
  };
  auto fewer = stages.names();
  fewer.erase("vector");
  for (const bool with_optimizer : {true, false}) {
    EXPECT_THAT(
        refusal(fewer, with_optimizer),
        AllOf(HasSubstr("the model lacks vector;"), Not(HasSubstr("no rank"))));
  }
  DividedRun more(stages.division(), stages.names());
  if (stages.first) more.model->register_parameter("new", torch::ones({2}));
  const std::string message = message_of(
      [&] { load_snapshot(path, more.state, {.will_save = false}); });
  EXPECT_THAT(message, HasSubstr("the snapshot lacks new"));
  EXPECT_EQ(more.model->parameters()[0].numel(),
            saved.model->parameters()[0].numel());
}

// Each rank lacks parameters of one optimizer, under the same name. They were
// taken for parameters that no rank has, and the error named no optimizer.
WORLD_TEST(LayoutSnapshot, TwoOptimizersMayBeCutAtDifferentPlaces, 2) {
  auto group = init_process_group("gloo");
  const std::string path = (world.folder / "cuts").string() + "/";
  const bool first = world.rank == 0;
  using Names = std::set<std::string>;
  const auto made = [](const Names& names) {
    auto module = std::make_shared<torch::nn::Module>();
    for (const std::string& name : names) {
      module->register_parameter(name, torch::ones({2}));
    }
    return module;
  };
  const auto model = made(first ? Names{"a", "b"} : Names{"c", "d"});
  const auto critic = made(first ? Names{"a", "b", "c"} : Names{"d"});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torch::optim::SGD of_critic(critic->parameters(), 0.2);
  TrainingState state{.model = model,
                      .optimizer = &optimizer,
                      .items = {{"critic", critic}, {"of_critic", of_critic}}};
  save_snapshot(path, state);
  of_critic.param_groups()[0].options().set_lr(0.5);
  EXPECT_TRUE(load_snapshot(path, state));
  EXPECT_EQ(of_critic.param_groups()[0].options().get_lr(), 0.2);
  // The optimizer that does not fit is named.
  torch::optim::SGD fewer({critic->parameters().front()}, 0.2);
  TrainingState other{.model = model,
                      .optimizer = &optimizer,
                      .items = {{"critic", critic}, {"of_critic", fewer}}};
  EXPECT_THAT(
      message_of([&] { load_snapshot(path, other, {.will_save = false}); }),
      HasSubstr(
          "the item \"of_critic\" of the snapshot does not fit: its group "
          "0 has b, the optimizer's does not"));
}

// Two ranks that have the same model must optimize the same parameters.
WORLD_TEST(LayoutSnapshot, AnOptimizerThatLacksAParameterIsRefused, 2) {
  auto group = init_process_group("gloo");
  const std::string path = (world.folder / "lacks").string() + "/";
  DividedRun run(undivided());
  torch::optim::AdamW fewer({run.model->named_parameters()["matrix"]});
  if (world.rank == 1) run.state.optimizer = &fewer;
  EXPECT_THAT(message_of([&] { save_snapshot(path, run.state); }),
              HasSubstr("the optimizer of rank 1 does not have the parameter"));
  run.state.optimizer = &*run.optimizer;
  run.step(1);
  save_snapshot(path, run.state);
  TrainingState other{.model = run.model,
                      .optimizer = world.rank == 1 ? &fewer : &*run.optimizer};
  EXPECT_THAT(message_of([&] { load_snapshot(path, other); }),
              HasSubstr("the optimizer of rank 1 does not have the parameter"));
  EXPECT_THAT(
      message_of([&] { load_snapshot(path, other, {.will_save = false}); }),
      HasSubstr("the optimizer's does not"));
}

WORLD_TEST(LayoutSnapshot, AFileIsRefusedAndTheWholeModelIsGathered, 1, 2, 4) {
  auto group = init_process_group("gloo");
  for (const Way& way : ways_of(world)) {
    if (!way.group || way.group->size() < world.size) continue;
    SCOPED_TRACE(way.name);
    DividedRun run(way.division);
    run.step(2);
    const std::string file =
        (world.folder / (way.name + ".safetensors")).string();
    if (way.name != "replicas" && way.name != "alone") {
      const std::string refusal =
          message_of([&] { save_snapshot(file, run.state); });
      if (world.size > 1) {
        EXPECT_THAT(refusal, AllOf(HasSubstr("is divided over ranks"),
                                   HasSubstr("full_state_dict()")));
      }
    }
    const NamedTensors whole = full_state_dict(*run.model);
    if (world.rank == 0) {
      ASSERT_THAT(whole, SizeIs(kShapes.size() + 1));
      for (const auto& [name, tensor] : whole) {
        if (!kShapes.contains(name)) continue;
        EXPECT_TRUE(tensor.equal(whole_of(name, "value"))) << name;
      }
      save_tensors(file, whole);
    } else {
      EXPECT_THAT(whole, IsEmpty());
    }
    barrier();
    // Each rank takes its parts of the file.
    DividedRun loaded(way.division);
    loaded.clear();
    load_model(file, *loaded.model);
    for (const auto& item : loaded.model->named_parameters()) {
      EXPECT_TRUE(item.value().equal(loaded.expected(item.key(), "value")))
          << item.key();
    }
    barrier();
  }
}

// One rank's part was written as if it were the model, and loaded as the part
// of every rank.
WORLD_TEST(LayoutSnapshot, APartIsNoFileOfAModel, 2) {
  auto group = init_process_group("gloo");
  DividedRun run(rows_over(group.get()));
  for (const char* name : {"part.pt", "part.safetensors"}) {
    const std::string file =
        (world.folder / (std::to_string(world.rank) + name)).string();
    EXPECT_THAT(message_of([&] { save_model(file, *run.model); }),
                AllOf(HasSubstr("cube"), HasSubstr("divided over ranks"),
                      HasSubstr("full_state_dict()")));
    EXPECT_FALSE(std::filesystem::exists(file));
    save_tensors(file, state_dict(*run.model));
    run.clear();
    EXPECT_THAT(message_of([&] { load_model(file, *run.model); }),
                AllOf(HasSubstr(file), HasSubstr("cube")));
    EXPECT_THAT(message_of([&] {
                  load_snapshot(file, run.state, {.will_save = false});
                }),
                AllOf(HasSubstr(file), HasSubstr("cube"),
                      HasSubstr("a part of the whole")));
    EXPECT_TRUE(run.model->parameters()[0].eq(-1).all().item<bool>());
  }
  DividedRun whole(undivided());
  const std::string file =
      (world.folder / (std::to_string(world.rank) + "whole.pt")).string();
  save_model(file, *whole.model);
  load_model(file, *run.model);
  EXPECT_TRUE(run.model->parameters()[0].equal(run.expected("cube", "value")));
}

// A snapshot of a parameter without elements could not be loaded.
WORLD_TEST(LayoutSnapshot, AParameterWithoutElementsComesBack, 1, 2, 3) {
  auto group = init_process_group("gloo");
  for (const auto& division :
       {rows_over(group.get()), elements_over(group.get())}) {
    const std::string path = (world.folder / "empty").string() + "/";
    DividedRun run(division, {"empty", "matrix"});
    run.step(5);
    save_snapshot(path, run.state);
    DividedRun loaded(division, {"empty", "matrix"});
    loaded.clear();
    EXPECT_TRUE(load_snapshot(path, loaded.state));
    loaded.expect_loaded(5);
    barrier();
    EXPECT_EQ(message_of([&] { verify_snapshot(path); }), "");
  }
}

// Optimizers leave out parameters without elements, so the count of steps that
// a rank with an empty part had loaded stayed as it was, and every save after a
// resume was refused.
WORLD_TEST(LayoutSnapshot, AnEmptyPartsCountOfStepsDoesNotMatter, 2, 3) {
  auto group = init_process_group("gloo");
  const std::string path = (world.folder / "steps").string() + "/";
  DividedRun run(elements_over(group.get()), {"single", "matrix"});
  run.step(5);
  for (const auto& parameter : run.model->parameters()) {
    if (parameter.numel() > 0) continue;
    static_cast<torch::optim::AdamWParamState&>(
        *run.optimizer->state().at(parameter.unsafeGetTensorImpl()))
        .step(3);
  }
  EXPECT_EQ(message_of([&] { save_snapshot(path, run.state); }), "");
  DividedRun loaded(elements_over(group.get()), {"single", "matrix"});
  loaded.clear();
  EXPECT_TRUE(load_snapshot(path, loaded.state));
  loaded.expect_loaded(5);
}

WORLD_TEST(LayoutSnapshot, TheStagesModelIsGathered, 2, 4) {
  auto group = init_process_group("gloo");
  const PipelineStages stages(world);
  DividedRun run(stages.division(), stages.names());
  const NamedTensors whole = full_state_dict(*run.model);
  if (world.rank > 0) return;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : whole) {
    names.push_back(name);
    if (!kShapes.contains(name)) continue;
    EXPECT_TRUE(tensor.equal(whole_of(name, "value"))) << name;
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"cube", "plain", "buffer_of_cube",
                                      "matrix", "vector", "buffer_of_matrix"}));
}

// A file that one process has saved, with its optimizer.
WORLD_TEST(LayoutSnapshot, PartsAreTakenFromAFile, 2) {
  auto group = init_process_group("gloo");
  const auto alone = new_group({0});
  const std::string file = (world.folder / "whole.pt").string();
  if (alone) {
    DividedRun run(undivided());
    run.step(6);
    save_snapshot(file, run.state, {.group = alone});
  }
  barrier();
  DividedRun run(elements_over(group.get()));
  run.clear();
  EXPECT_THAT(message_of([&] { load_snapshot(file, run.state); }),
              HasSubstr("is divided over ranks"));
  EXPECT_TRUE(load_snapshot(file, run.state, {.will_save = false}));
  run.expect_loaded(6);
  const std::string folder = (world.folder / "mapped").string() + "/";
  save_snapshot(folder, run.state);
  EXPECT_THAT(
      message_of([&] { load_model(folder, *run.model, {.mmap = true}); }),
      HasSubstr("cannot be a view of a file"));
}

}  // namespace
}  // namespace lockstep::internal
