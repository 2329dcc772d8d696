// Folders of snapshots that several ranks write and read together.

#include <gmock/gmock.h>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/placement.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

std::string snapshots_of(const World& world, const std::string& name) {
  return (world.folder / name).string() + "/";
}

WORLD_TEST(ShardedWorld, EveryRankWritesAPartAndResumes, 1, 2, 3) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "resume");
  ShardedRun run;
  run.set(5);
  run.state.epochs_run = world.rank == 0 ? 2 : 9;
  torch::manual_seed(static_cast<uint64_t>(world.rank) + 10);
  // Only the first rank's buffers are saved.
  for (auto& buffer : run.model->buffers()) buffer.fill_(world.rank + 3);
  const std::string saved = save_snapshot(path, run.state);
  EXPECT_EQ(saved, path + "000001-step-5");
  const at::Tensor drawn = torch::rand({4});

  torch::manual_seed(77);
  ShardedRun loaded;
  const LoadedSnapshot result = load_snapshot(path, loaded.state);
  EXPECT_EQ(result.path, saved);
  EXPECT_EQ(loaded.number(), 5);
  EXPECT_EQ(loaded.state.epochs_run, 2);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({4})));
  EXPECT_EQ(loaded.model->buffers().size(), 3u);
  for (const auto& buffer : loaded.model->buffers()) {
    EXPECT_TRUE(buffer.eq(3).all().item<bool>()) << buffer;
  }
  EXPECT_TRUE(
      same_optimizer(state_dict(loaded.optimizer), state_dict(run.optimizer)));

  // Nothing is written twice, and each rank wrote something.
  if (world.rank == 0) {
    const TensorFiles files = TensorFiles::open_folder(saved);
    std::set<size_t> used;
    for (const auto& [name, tensor] : files.tensors()) {
      EXPECT_THAT(tensor.parts, SizeIs(1)) << name;
      used.insert(tensor.parts[0].file);
    }
    EXPECT_THAT(used, SizeIs(static_cast<size_t>(world.size)));
  }
  barrier();
}

WORLD_TEST(ShardedWorld, AMissingFolderIsMade, 1, 2) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "made/below");
  ShardedRun run;
  EXPECT_FALSE(load_snapshot(path, run.state));
  EXPECT_TRUE(fs::is_directory(path));
  EXPECT_TRUE(fs::is_empty(path));
  EXPECT_THAT(message_of([&] { load_snapshot("/proc/a/", run.state); }),
              HasSubstr("no snapshot can be saved in \"/proc/a\""));
}

// A save that fails on one rank fails on all, and the ranks still make the same
// calls.
WORLD_TEST(ShardedWorld, AFailedSaveIsAnErrorOnEveryRank, 2, 3) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "failed");
  ShardedRun run;
  run.set(1);
  save_snapshot(path, run.state);
  const auto expect_failure = [&](const TrainingState& state,
                                  const std::string& words) {
    const std::string message = message_of([&] { save_snapshot(path, state); });
    EXPECT_THAT(message, HasSubstr(words));
    EXPECT_THAT(message, ::testing::Not(HasSubstr("\n")));
    if (world.rank != 1) {
      EXPECT_THAT(message, HasSubstr("rank 1"));
    }
  };
  // One rank cannot say what it has.
  expect_failure(world.rank == 1 ? TrainingState{} : run.state,
                 "TrainingState.model is not set");
  // One rank has another model, or trained another number of steps.
  const auto other =
      torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  expect_failure(world.rank == 1 ? TrainingState{.model = other.ptr()}
                                 : TrainingState{.model = run.model.ptr()},
                 "rank 1 has the tensor \"model.0.weight\" as F32[4, 3]");
  ShardedRun ahead;
  ahead.set(world.rank == 1 ? 2 : 1);
  expect_failure(ahead.state,
                 "the optimizer of rank 1 has other hyperparameters or step "
                 "counts");
  // A bug: the last group decided for all.
  torch::manual_seed(0);
  torch::nn::Linear net(2, 2);
  torch::optim::SGD groups({torch::optim::OptimizerParamGroup({net->weight}),
                            torch::optim::OptimizerParamGroup({net->bias})},
                           torch::optim::SGDOptions(0.1));
  if (world.rank == 1) groups.param_groups()[0].options().set_lr(0.2);
  expect_failure({.model = net.ptr(), .optimizer = &groups},
                 "the optimizer of rank 1 has other hyperparameters");
  // One rank cannot write its part.
  class Full : public SaveFiles {
    void before(const char* call, const std::string& file) override {
      if (std::string_view(call) == "write") {
        throw std::system_error(ENOSPC, std::generic_category(), file);
      }
    }
  };
  Full full;
  SaveFiles files;
  const std::string message = message_of([&] {
    const Ranks ranks(nullptr);
    ShardedSave save(path, run.state, {}, ranks,
                     world.rank == 1 ? full : files);
    save.write();
    save.commit(ranks);
  });
  EXPECT_THAT(message, HasSubstr("No space left on device"));
  if (world.rank != 1) {
    EXPECT_THAT(message, HasSubstr("was not saved: rank 1: "));
  }
  barrier();
  EXPECT_EQ(names_in(path),
            (std::vector<std::string>{"000001-step-1", "latest"}));
  // Loading tries for a moment whether the folder can be written to, and no
  // rank may see that above.
  barrier();
  ShardedRun loaded;
  EXPECT_TRUE(load_snapshot(path, loaded.state));
  EXPECT_EQ(loaded.number(), 1);
  run.set(2);
  EXPECT_EQ(save_snapshot(path, run.state), path + "000002-step-2");
}

// Only one rank reads the damaged bytes, or sees other files.
WORLD_TEST(ShardedWorld, ADamagedSnapshotIsSkippedByAll, 2, 3) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "damaged");
  ShardedRun run;
  run.set(1);
  const std::string first = save_snapshot(path, run.state);
  run.set(2);
  const std::string second = save_snapshot(path, run.state);
  const std::string file =
      second + "/" + shard_file_name(1, 0, 1);  // of rank 1
  if (world.rank == 0) {
    const TensorFiles files = TensorFiles::open_folder(second);
    // Only rank 1 reads its generator.
    const auto& part = files.tensors().at("lockstep.generator.1").parts.at(0);
    std::string content = read_file(file);
    content[part.begin + 9] ^= 1;
    write_file(file, content);
  }
  barrier();
  ShardedRun loaded;
  const LoadedSnapshot result = load_snapshot(path, loaded.state);
  EXPECT_EQ(result.path, first);
  EXPECT_EQ(loaded.number(), 1);
  ASSERT_THAT(result.skipped, SizeIs(1));
  EXPECT_THAT(result.skipped[0],
              AllOf(HasSubstr("rank 1: "), HasSubstr(file),
                    HasSubstr("\"lockstep.generator.1\" does not match")));
  barrier();
  if (world.rank == 0) fs::remove(first + "/manifest.json");
  barrier();
  EXPECT_THAT(message_of([&] { load_snapshot(path, loaded.state); }),
              HasSubstr("has 2 snapshots, none of which can be loaded"));
  EXPECT_THAT(message_of([&] {
                load_snapshot(second + "/", loaded.state, {.will_save = false});
              }),
              HasSubstr("does not match its checksum"));
  EXPECT_EQ(loaded.number(), 1);
}

WORLD_TEST(ShardedWorld, AModelThatFitsOnSomeRanksOnlyIsLoadedByNone, 2, 3) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "fits");
  ShardedRun run;
  run.set(1);
  save_snapshot(path, run.state);
  const auto other = torch::nn::Sequential(torch::nn::Linear(5, 2));
  ShardedRun loaded;
  if (world.rank == 1) loaded.state.model = other.ptr();
  loaded.state.optimizer = nullptr;
  const std::string message = message_of(
      [&] { load_snapshot(path, loaded.state, {.will_save = false}); });
  EXPECT_THAT(message, HasSubstr("belongs to another model"));
  if (world.rank != 1) {
    EXPECT_THAT(message, HasSubstr("was loaded by no rank: rank 1: "));
    EXPECT_EQ(loaded.model->parameters()[0].sum().item<float>(), 0);
  }
}

// Fault 37: a snapshot was made of parts of models that had drifted apart,
// which no rank ever had. A file was that of the first rank, and nothing said
// that the others had something else.
WORLD_TEST(ShardedWorld, ReplicasThatDifferAreNamedAndNotMixed, 2, 3) {
  const auto group = init_process_group();
  for (const char* name : {"drifted/", "drifted.pt", "drifted.safetensors"}) {
    const std::string path = (world.folder / name).string();
    ShardedRun run;
    torch::nn::Linear average(3, 2);
    run.state.items = {{"ema", average}};
    const auto saved_step = [&] { return load_snapshot_file(path).step; };
    run.set(1);
    for (auto& parameter : average->parameters()) parameter.data().fill_(1);
    save_snapshot(path, run.state);
    run.set(2);
    const auto set_weight = [&](double value) {
      const torch::NoGradGuard no_grad;
      run.model->named_parameters()["0.weight"][1][2] = value;
    };
    if (world.rank == 1) set_weight(2.5);
    // Ranks may have other buffers.
    for (auto& buffer : run.model->buffers()) buffer.fill_(world.rank);
    const auto names_both =
        AllOf(HasSubstr("the tensor \"model.0.weight\""),
              HasSubstr(world.size == 2
                            ? "on rank 0 differ from those on rank 1"
                            : "on ranks 0 and 2 differ from those on rank 1"),
              HasSubstr("the result would be a mixture"),
              ::testing::Not(HasSubstr("\n")));
    for (const bool overlaps : {false, true}) {
      EXPECT_THAT(message_of([&] { save_snapshot(path, run.state); }),
                  names_both);
      std::string told;
      SnapshotSaver saver(path, run.state,
                          {.on_saved = [&](const auto& s) { told = s.error; },
                           .overlap_copy = overlaps});
      saver.save();
      saver.wait_for_copy();
      // Changes after the copy do not matter.
      set_weight(2);
      saver.wait();
      EXPECT_THAT(told, names_both);
      if (world.rank == 1) set_weight(2.5);
    }
    barrier();
    EXPECT_EQ(saved_step(), 1);
    if (path.ends_with('/')) {
      EXPECT_THAT(names_in(path), ElementsAre("000001-step-1", "latest"));
    }
    barrier();
    // The state of the optimizer is compared, too, and the modules of items.
    set_weight(2);
    const at::Tensor parameter = run.model->parameters()[0];
    auto& state = static_cast<torch::optim::AdamParamState&>(
        *run.optimizer.state().at(parameter.unsafeGetTensorImpl()));
    const at::Tensor moment = state.exp_avg().clone();
    if (world.rank == 1) state.exp_avg().add_(1);
    EXPECT_THAT(message_of([&] { save_snapshot(path, run.state); }),
                HasSubstr("\"optimizer.state.0.weight.exp_avg\""));
    state.exp_avg(moment);
    if (world.rank == 1) average->bias.data().fill_(3);
    EXPECT_THAT(message_of([&] { save_snapshot(path, run.state); }),
                HasSubstr("the tensor \"ema.bias\""));
    average->bias.data().fill_(1);
    save_snapshot(path, run.state);
    EXPECT_EQ(saved_step(), 2);
    barrier();
  }
}

// The state of a sharded optimizer that was collected is on one rank only.
WORLD_TEST(ShardedWorld, WhatOnlyTheFirstRankHasIsInAFile, 2, 3) {
  const auto group = init_process_group();
  const std::string path = (world.folder / "collected.pt").string();
  ShardedRun run;
  run.set(3);
  if (world.rank > 0) run.optimizer.state().clear();
  if (world.rank > 1) run.state.model = nullptr;
  save_snapshot(path, run.state);
  EXPECT_EQ(load_snapshot_file(path).optimizer_state->state.size(), 4u);
  barrier();
}

// Parts that only some ranks share are compared among these.
WORLD_TEST(ShardedWorld, PartsOfSomeRanksAreCompared, 3) {
  const auto group = init_process_group();
  const std::string path = snapshots_of(world, "some");
  // 6 MiB, so that it is cut, and has several blocks of checksums.
  torch::nn::ParameterDict model;
  model->insert("all", torch::ones({3 << 19}));
  if (world.rank > 0) model->insert("some", torch::ones({3 << 19}));
  const TrainingState state{.model = model.ptr()};
  save_snapshot(path, state);
  if (world.rank == 2) model["some"].data()[-1] = 2;
  EXPECT_THAT(
      message_of([&] { save_snapshot(path, state); }),
      AllOf(HasSubstr("\"model.some\""),
            HasSubstr("its values on rank 1 differ from those on rank 2,")));
}

// The result was made of parts of replicas that had drifted apart, which no
// rank ever had; of a tensor that no rank divides it was that of rank 0.
WORLD_TEST(ShardedWorld, AFullStateDictIsNotMadeOfReplicasThatDiffer, 2, 4) {
  const auto group = init_process_group();
  // Rows over pairs of ranks, which are replicas of each other.
  std::vector<std::vector<int>> pairs;
  for (int first = 0; first < world.size; first += 2) {
    pairs.push_back({first, first + 1});
  }
  const auto pair = new_subgroups_by_enumeration(pairs);
  torch::nn::ParameterDict model;
  model->insert("all", torch::ones({3 << 19}));
  model->insert("part", torch::ones({1 << 19}));
  set_placement(model["part"], lockstep::Shard{.dim = 0}, pair);
  model->register_buffer("mean", torch::full({2}, world.rank));
  EXPECT_EQ(full_state_dict(*model).size(), world.rank == 0 ? 3 : 0);
  for (const char* name : {"all", "part"}) {
    if (world.size == 2 && name == std::string("part")) continue;
    const int other = world.size - 1;
    if (world.rank == other) model[name].data()[-1] = 2;
    EXPECT_THAT(
        message_of([&] { full_state_dict(*model); }),
        AllOf(HasSubstr("the tensor \"model." + std::string(name) + "\""),
              HasSubstr("differ from those on rank " + std::to_string(other)),
              Not(HasSubstr("\n"))));
    if (world.rank == other) model[name].data()[-1] = 1;
  }
  EXPECT_EQ(full_state_dict(*model).size(), world.rank == 0 ? 3 : 0);
}

// Three ranks save, one and two load; and the other way round.
WORLD_TEST(ShardedWorld, AnyNumberOfRanksLoads, 3) {
  const auto group = init_process_group();
  const auto pair = new_group({0, 1});
  const auto alone = new_group({0});
  const std::vector<ProcessGroupPtr> groups{group.get(), pair, alone};
  const std::vector<int> sizes{3, 2, 1};
  for (size_t by = 0; by < groups.size(); ++by) {
    const std::string path = snapshots_of(world, "by" + std::to_string(by));
    ShardedRun run;
    run.set(4);
    if (groups[by]) save_snapshot(path, run.state, {.group = groups[by]});
    barrier();
    for (size_t with = 0; with < groups.size(); ++with) {
      if (!groups[with]) continue;
      ShardedRun loaded;
      EXPECT_TRUE(load_snapshot(path, loaded.state, {.group = groups[with]}));
      EXPECT_EQ(loaded.number(), 4);
      // With another number of ranks each is seeded, and no two alike.
      const at::Tensor drawn = torch::rand({4});
      load_snapshot(path, loaded.state, {.group = groups[with]});
      EXPECT_TRUE(drawn.equal(torch::rand({4})));
      if (sizes[with] == 1) continue;
      std::vector<at::Tensor> all(static_cast<size_t>(sizes[with]));
      for (at::Tensor& tensor : all) tensor = torch::empty({4});
      all_gather(all, drawn, {.group = groups[with]});
      if (sizes[with] != sizes[by]) {
        EXPECT_FALSE(all[0].equal(all[1]));
      }
    }
    barrier();
  }
}

}  // namespace
}  // namespace lockstep::internal
