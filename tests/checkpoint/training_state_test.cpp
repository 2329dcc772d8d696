// Snapshots of a whole world: an error on one rank is reported on all.

#include "lockstep/checkpoint/training_state.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

// The same on all ranks, also after training with different dropout.
struct Run {
  torch::nn::Sequential model = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(4, 4),
                                 torch::nn::Dropout(0.5),
                                 torch::nn::Linear(4, 1));
  }();
  torch::optim::Adam optimizer{model->parameters()};
  TrainingState state{.model = model.ptr(), .optimizer = &optimizer};

  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      model->forward(torch::ones({2, 4})).sum().backward();
      for (const auto& parameter : model->parameters()) {
        at::Tensor gradient = parameter.grad();
        all_reduce(gradient);
      }
      optimizer.step();
      state.step += 1;
    }
  }
  at::Tensor parameters() const {
    std::vector<at::Tensor> parts;
    for (const auto& p : model->parameters()) {
      parts.push_back(p.detach().reshape({-1}));
    }
    return torch::cat(parts);
  }
};

WORLD_TEST(TrainingState, EveryRankResumesWithItsOwnGenerator, 1, 2, 3) {
  const auto group = init_process_group();
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const std::string path = world.folder / name;
    Run first;
    torch::manual_seed(static_cast<uint64_t>(world.rank) + 10);
    first.train(3);
    first.state.epochs_run = 4;
    first.state.sampler_state = {{"epoch", 5}};
    save_snapshot(path, first.state);
    const at::Tensor drawn = torch::rand({4});
    first.train(3);

    Run second;
    torch::manual_seed(77);
    at::Tensor weight = second.model->parameters()[0];
    weight.data().fill_(7);
    EXPECT_TRUE(load_snapshot(path, second.state));
    EXPECT_EQ(second.state.next_epoch(), 5);
    EXPECT_EQ(second.state.step, 3);
    EXPECT_EQ(second.state.sampler_state, first.state.sampler_state);
    EXPECT_TRUE(torch::equal(drawn, torch::rand({4})));
    second.train(3);
    EXPECT_TRUE(torch::equal(first.parameters(), second.parameters()));
  }
}

// Keeps one number for itself, and one for each group, as Python's do.
class CountingScheduler : public ResumableScheduler {
 public:
  StateTree state_dict() const override {
    StateTree::Dict dict, group;
    dict.set("last_epoch", epoch);
    group.set("initial_lr", initial_lr);
    dict.set("param_groups", StateTree::List{group});
    return dict;
  }
  std::function<void()> prepare_load(const StateTree& state) override {
    if (refuses) throw std::invalid_argument("not of mine");
    const auto& dict = std::get<StateTree::Dict>(state.value);
    const auto& groups =
        std::get<StateTree::List>(dict.find("param_groups")->value);
    const auto& group = std::get<StateTree::Dict>(groups.at(0).value);
    return [this, read = std::get<int64_t>(dict.find("last_epoch")->value),
            lr = std::get<double>(group.find("initial_lr")->value)] {
      epoch = read;
      initial_lr = lr;
    };
  }

  int64_t epoch = 0;
  double initial_lr = 0.1;
  bool refuses = false;
};

WORLD_TEST(TrainingState, TheSchedulerIsRestored, 1, 2) {
  const auto group = init_process_group();
  for (const char* name :
       {"scheduled.pt", "scheduled.safetensors", "scheduled/"}) {
    const std::string path = world.folder / name;
    torch::manual_seed(1);  // replicas are equal
    Run first;
    CountingScheduler saved;
    saved.epoch = 7 + world.rank;  // that of rank 0 is saved
    saved.initial_lr = 0.25;
    first.state.scheduler = &saved;
    save_snapshot(path, first.state);
    // The optimizer has what Python's has.
    const Snapshot file = load_snapshot_file(path);
    EXPECT_EQ(std::get<double>(file.optimizer_state->param_groups[0].options.at(
                  "initial_lr")),
              0.25);
    EXPECT_EQ(file.scheduler_state->as<StateTree::Dict>()->items.size(), 1u);

    Run second;
    CountingScheduler loaded;
    second.state.scheduler = &loaded;
    EXPECT_TRUE(load_snapshot(path, second.state));
    EXPECT_EQ(loaded.epoch, 7);
    EXPECT_EQ(loaded.initial_lr, 0.25);
    // A program without the scheduler, or a file without one, is not a mistake.
    Run without;
    EXPECT_TRUE(load_snapshot(path, without.state));
    save_snapshot(path, without.state);
    EXPECT_FALSE(load_snapshot_file(path).scheduler_state);
    loaded.epoch = 99;
    EXPECT_TRUE(load_snapshot(path, second.state));
    EXPECT_EQ(loaded.epoch, 99);
  }
}

WORLD_TEST(TrainingState, ASchedulerThatRefusesOnOneRankStopsAll, 2, 3) {
  const auto group = init_process_group();
  const std::string path = world.folder / "refused.pt";
  Run run;
  CountingScheduler scheduler;
  run.state.scheduler = &scheduler;
  save_snapshot(path, run.state);
  run.train(2);
  const at::Tensor before = run.parameters().clone();
  scheduler.epoch = 5;
  scheduler.refuses = world.rank == 1;
  const std::string message =
      message_of([&] { load_snapshot(path, run.state); });
  EXPECT_THAT(message, HasSubstr("not of mine"));
  if (world.rank != 1) {
    EXPECT_THAT(message, HasSubstr("rank 1: "));
  }
  EXPECT_EQ(scheduler.epoch, 5);
  EXPECT_TRUE(torch::equal(run.parameters(), before));
}

// Numbers of a scheduler of one's own that no scheduler of Python keeps would
// be options that no optimizer has.
class WarmingScheduler : public CountingScheduler {
 public:
  StateTree state_dict() const override {
    StateTree state = CountingScheduler::state_dict();
    auto& dict = std::get<StateTree::Dict>(state.value);
    StateTree::List groups = *dict.find("param_groups")->as<StateTree::List>();
    std::get<StateTree::Dict>(groups.at(0).value).set("warmth", warmth);
    dict.set("param_groups", groups);
    return state;
  }
  std::function<void()> prepare_load(const StateTree& state) override {
    const auto& dict = std::get<StateTree::Dict>(state.value);
    const auto& group = std::get<StateTree::Dict>(
        dict.find("param_groups")->as<StateTree::List>()->at(0).value);
    return [this, load = CountingScheduler::prepare_load(state),
            read = std::get<double>(group.find("warmth")->value)] {
      load();
      warmth = read;
    };
  }
  double warmth = 0.5;
};

WORLD_TEST(TrainingState, NumbersOfASchedulerOfYourOwnComeBack, 1, 2) {
  const auto group = init_process_group();
  for (const char* name : {"own.pt", "own.safetensors", "own/"}) {
    const std::string path = world.folder / name;
    Run run;
    WarmingScheduler scheduler;
    run.state.scheduler = &scheduler;
    scheduler.warmth = 0.75;
    scheduler.initial_lr = 0.25;
    save_snapshot(path, run.state);
    scheduler.warmth = scheduler.initial_lr = 0;
    EXPECT_TRUE(load_snapshot(path, run.state)) << name;
    EXPECT_EQ(scheduler.warmth, 0.75) << name;
    EXPECT_EQ(scheduler.initial_lr, 0.25) << name;
    run.state.scheduler = nullptr;  // the optimizer takes its options
    EXPECT_TRUE(load_snapshot(path, run.state)) << name;
  }
}

// Weights alone set `step` to 0 and the epochs to none, without a word.
WORLD_TEST(TrainingState, NumbersThatTheFileLacksStayAndAreTold, 1, 2) {
  const auto group = init_process_group();
  const fs::path folder = world.folder / "weights";
  Run run;
  if (world.rank == 0) {
    fs::create_directory(folder);
    for (const char* name : {"alone.pt", "alone.safetensors"}) {
      save_tensors(folder / name, state_dict(*run.model));
    }
  }
  barrier();
  run.state.optimizer = nullptr;
  for (const char* name : {"alone.pt", "alone.safetensors", ""}) {
    run.state.epochs_run = 3;
    run.state.step = 7;
    run.state.sampler_state = {{"epoch", 4}};
    run.state.metadata = {{"run", "seventh"}};
    const KeptWarnings warnings;
    // Nothing is saved into a folder of weights.
    const auto loaded =
        load_snapshot(folder / name, run.state, {.will_save = *name != 0});
    EXPECT_TRUE(loaded);
    EXPECT_THAT(loaded.not_restored,
                ElementsAre("generator", "epochs_run", "step", "sampler_state",
                            "metadata"))
        << name;
    if (world.rank == 0 && *name != 0) {
      EXPECT_THAT(warnings.texts(),
                  ElementsAre(HasSubstr("which keep their values: epochs_run, "
                                        "step, sampler_state, metadata")));
    }
    EXPECT_EQ(run.state.epochs_run, 3);
    EXPECT_EQ(run.state.step, 7);
    EXPECT_EQ(run.state.sampler_state.at("epoch"), 4);
    EXPECT_EQ(run.state.metadata.at("run"), "seventh");
  }
}

WORLD_TEST(TrainingState, WithoutAFileNothingIsLoaded, 1, 2) {
  const auto group = init_process_group();
  Run run;
  EXPECT_FALSE(load_snapshot(world.folder / "none.pt", run.state));
  EXPECT_EQ(run.state.next_epoch(), 0);
}

WORLD_TEST(TrainingState, AMissingFolderIsFoundBeforeTraining, 1, 2, 3) {
  const auto group = init_process_group();
  Run run;
  const std::string path = world.folder / "no such folder/a.pt";
  const std::string message =
      message_of([&] { load_snapshot(path, run.state); });
  EXPECT_THAT(message, HasSubstr("no snapshot can be saved as"));
  EXPECT_THAT(message, HasSubstr("make the folder"));
  EXPECT_THAT(message, HasSubstr("No such file or directory"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("\n")));
  if (world.rank > 0) {
    EXPECT_THAT(message, HasSubstr("rank 0"));
  }
  // Without will_save the missing folder is only a missing file.
  EXPECT_FALSE(load_snapshot(path, run.state, {.will_save = false}));
}

WORLD_TEST(TrainingState, AnOptimizerWithoutSnapshotsIsFoundBeforeTraining, 1,
           2) {
  const auto group = init_process_group();
  Run run;
  torch::optim::LBFGS optimizer(run.state.model->parameters());
  run.state.optimizer = &optimizer;
  const std::string path = world.folder / "lbfgs.pt";
  EXPECT_THAT(
      message_of([&] { load_snapshot(path, run.state); }),
      HasSubstr("an optimizer of type torch::optim::LBFGS cannot be saved"));
  EXPECT_FALSE(load_snapshot(path, run.state, {.will_save = false}));
}

WORLD_TEST(TrainingState, AFolderThatTakesNoFilesIsFoundBeforeTraining, 1, 2) {
  const auto group = init_process_group();
  Run run;
  // Nobody, root included, can make a file there.
  EXPECT_THAT(message_of([&] { load_snapshot("/proc/a.pt", run.state); }),
              HasSubstr("no snapshot can be saved as \"/proc/a.pt\""));
  EXPECT_FALSE(load_snapshot("/proc/a.pt", run.state, {.will_save = false}));
}

WORLD_TEST(TrainingState, LookingWhetherItCanSaveLeavesNothing, 1, 2) {
  const auto group = init_process_group();
  Run run;
  const auto folder = world.folder / "empty";
  std::filesystem::create_directories(folder);
  EXPECT_FALSE(load_snapshot(folder / "a.pt", run.state));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

WORLD_TEST(TrainingState, AFailedSaveIsAnErrorOnEveryRank, 1, 2, 3) {
  const auto group = init_process_group();
  Run run;
  const std::string message = message_of(
      [&] { save_snapshot(world.folder / "no such folder/a.pt", run.state); });
  EXPECT_THAT(message, HasSubstr("a file cannot be made in"));
  if (world.rank > 0) {
    EXPECT_THAT(message, HasSubstr("was not saved: rank 0: "));
  }
  // The ranks still make the same calls.
  save_snapshot(world.folder / "a.pt", run.state);
}

// Rank 0 wrote a file without them, and nothing was said.
WORLD_TEST(TrainingState, WhatOnlyAnotherRankHasIsNotLeftOutOfAFile, 2, 3) {
  const auto group = init_process_group();
  Run run;
  CountingScheduler scheduler;
  const auto path = world.folder / "incomplete.pt";
  TrainingState state = run.state;
  if (world.rank == 1) state.scheduler = &scheduler;
  const auto refused = [&](const char* words) {
    EXPECT_THAT(message_of([&] { save_snapshot(path, state); }),
                HasSubstr(words));
    EXPECT_THAT(message_of([&] { load_snapshot(path, state); }),
                HasSubstr(words));
  };
  refused("rank 1 has TrainingState::scheduler, and rank 0");
  if (world.rank == 0) state.optimizer = nullptr;
  refused("rank 1 has TrainingState::optimizer, and rank 0");
  EXPECT_FALSE(fs::exists(path));
}

WORLD_TEST(TrainingState, AFileOnSomeRanksOnlyNamesTheOthers, 2, 3) {
  const auto group = init_process_group();
  Run run;
  const std::string own =
      world.folder / ("own-" + std::to_string(world.rank) + ".pt");
  if (world.rank != 1) {
    Snapshot snapshot;
    for (const auto& item : run.model->named_parameters()) {
      snapshot.model_state.emplace_back(item.key(), item.value());
    }
    save_snapshot_file(own, snapshot);
  }
  const auto before = run.model[0]->as<torch::nn::Linear>()->weight.clone();
  EXPECT_THAT(message_of([&] { load_snapshot(own, run.state); }),
              HasSubstr("is missing on rank 1 of"));
  EXPECT_TRUE(
      torch::equal(before, run.model[0]->as<torch::nn::Linear>()->weight));
}

WORLD_TEST(TrainingState, DifferentFilesAreRefused, 2, 3) {
  const auto group = init_process_group();
  Run run;
  const std::string own =
      world.folder / ("own-" + std::to_string(world.rank) + ".safetensors");
  Snapshot snapshot;
  for (const auto& item : run.model->named_parameters()) {
    snapshot.model_state.emplace_back(item.key(),
                                      torch::ones_like(item.value()));
  }
  snapshot.step = world.rank == 1 ? 5 : 6;
  save_snapshot_file(own, snapshot);
  EXPECT_THAT(message_of([&] { load_snapshot(own, run.state); }),
              HasSubstr("is not the same file on rank 1 as on rank 0"));
  EXPECT_EQ(run.state.step, 0);
}

WORLD_TEST(TrainingState, ADamagedFileOnOneRankIsNamedOnAll, 2, 3) {
  const auto group = init_process_group();
  Run run;
  const std::string own =
      world.folder / ("bad-" + std::to_string(world.rank) + ".pt");
  Snapshot snapshot;
  for (const auto& item : run.model->named_parameters()) {
    snapshot.model_state.emplace_back(item.key(),
                                      torch::ones_like(item.value()));
  }
  save_snapshot_file(own, snapshot);
  if (world.rank == 1) std::filesystem::resize_file(own, 100);
  const std::string message =
      message_of([&] { load_snapshot(own, run.state); });
  EXPECT_THAT(message, HasSubstr("cut short"));
  if (world.rank != 1) {
    EXPECT_THAT(message, HasSubstr("rank 1: "));
  }
}

WORLD_TEST(TrainingState, AnotherWorldSizeSeedsEachRankDifferently, 2) {
  const auto group = init_process_group();
  Run run;
  const std::string path = world.folder / "one.pt";
  if (world.rank == 0) {
    Snapshot snapshot;
    for (const auto& item : run.model->named_parameters()) {
      snapshot.model_state.emplace_back(item.key(), item.value());
    }
    snapshot.generator_states = {
        at::detail::getDefaultCPUGenerator().get_state()};
    save_snapshot_file(path, snapshot);
  }
  barrier();
  EXPECT_TRUE(load_snapshot(path, run.state));
  const at::Tensor drawn = torch::rand({4});
  EXPECT_TRUE(load_snapshot(path, run.state));
  EXPECT_TRUE(torch::equal(drawn, torch::rand({4})));
  std::vector<at::Tensor> all{torch::empty({4}), torch::empty({4})};
  all_gather(all, drawn);
  EXPECT_FALSE(torch::equal(all[0], all[1]));
}

}  // namespace
}  // namespace lockstep::internal
