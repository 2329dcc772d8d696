// A training of several parts that is killed and resumed: TrainingState::items.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/sgd.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/items_training.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using namespace lockstep::internal::testing;

void expect_same(Training& a, Training& b) {
  for (const auto& [x, y] : {std::pair<torch::nn::Module*, torch::nn::Module*>(
                                 a.net.get(), b.net.get()),
                             {a.critic.get(), b.critic.get()},
                             {&a.ema, &b.ema}}) {
    const auto own = state_dict(*x);
    const auto other = state_dict(*y);
    ASSERT_EQ(own.size(), other.size());
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(own[i].second.equal(other[i].second)) << own[i].first;
    }
  }
  EXPECT_EQ(a.scaler.state_dict(), b.scaler.state_dict());
  EXPECT_EQ(a.critic_scheduler.get_last_lr(), b.critic_scheduler.get_last_lr());
  EXPECT_EQ(a.curriculum.level, b.curriculum.level);
  EXPECT_TRUE(a.curriculum.history.equal(b.curriculum.history));
  EXPECT_EQ(a.sampler.state_dict(), b.sampler.state_dict());
  EXPECT_EQ(a.state.step, b.state.step);
  EXPECT_EQ(a.log_text(), b.log_text());
}

// Trains in one go and with an end in between, and expects the same bits.
void expect_resumed(const World& world, const std::string& name,
                    OptimizerKind kind, bool with_metric) {
  SCOPED_TRACE(name);
  const std::string path = (world.folder / name).string();
  const auto log = [&](const char* run) {
    return (world.folder / (run + name.substr(0, 4) + ".csv")).string();
  };
  const auto seed = [&](uint64_t value) {
    torch::manual_seed(value);  // equal models
  };
  const int64_t steps_of_epoch = kSamples / kBatch / world.size;
  const int64_t saved_at = steps_of_epoch + 3;  // in the second epoch
  const int64_t end = saved_at + steps_of_epoch;
  seed(1);
  Training whole(log("whole"), kind, with_metric);
  torch::manual_seed(10 + static_cast<uint64_t>(world.rank));
  whole.train(end);
  const at::Tensor next_of_whole = torch::rand({3});

  seed(1);
  {
    Training killed(log("killed"), kind, with_metric);
    torch::manual_seed(10 + static_cast<uint64_t>(world.rank));
    SnapshotSaver saver(path, killed.state, {.every_steps = saved_at});
    killed.train(saved_at + 2, &saver);  // two steps are done again
    saver.wait();
  }
  seed(2);
  Training resumed(log("killed"), kind, with_metric);
  const LoadedSnapshot loaded = load_snapshot(path, resumed.state);
  ASSERT_TRUE(loaded);
  EXPECT_THAT(loaded.not_restored, IsEmpty());
  EXPECT_THAT(loaded.not_used, IsEmpty());
  EXPECT_THAT(
      loaded.restored,
      AllOf(Contains("model"), Contains("optimizer"), Contains("generator"),
            Contains("ema"), Contains("scaler"), Contains("critic_optimizer")));
  EXPECT_EQ(resumed.state.step, saved_at);
  resumed.train(end);
  expect_same(whole, resumed);
  EXPECT_TRUE(next_of_whole.equal(torch::rand({3})));
  if (with_metric) {
    EXPECT_EQ(whole.mean.compute(), resumed.mean.compute());
  }
}

WORLD_TEST(TrainingItems, AResumedRunHasTheSameBits, 1, 2) {
  const auto group = init_process_group();
  expect_resumed(world, "fold/", OptimizerKind::kPlain, true);
  expect_resumed(world, "zero/", OptimizerKind::kSharded, true);
  expect_resumed(world, "a.pt", OptimizerKind::kPlain, world.size == 1);
  expect_resumed(world, "b.safetensors", OptimizerKind::kPlain,
                 world.size == 1);
}

WORLD_TEST(TrainingItems, WhatIsNotThereIsTold, 2) {
  const auto group = init_process_group();
  Training run((world.folder / "log.csv").string());
  const std::string path = (world.folder / "told").string();
  TrainingState other{.model = run.net.ptr(), .items = {{"ema", run.ema}}};
  for (const char* ending : {"/", ".pt", ".safetensors"}) {
    save_snapshot(path + ending, other);
    TrainingState fewer{.model = run.net.ptr(),
                        .optimizer = run.optimizer.get(),
                        .items = {{"scaler", run.scaler}}};
    const LoadedSnapshot loaded = load_snapshot(path + ending, fewer);
    EXPECT_THAT(loaded.restored, UnorderedElementsAre("model", "generator"));
    EXPECT_THAT(loaded.not_restored,
                UnorderedElementsAre("optimizer", "scaler"));
    EXPECT_THAT(loaded.not_used, ElementsAre("ema"));
  }
}

WORLD_TEST(TrainingItems, WhatEachRankHasIsItsOwn, 2) {
  const auto group = init_process_group();
  const std::string path = (world.folder / "own/").string();
  torch::manual_seed(1);  // replicas are equal
  const auto net = small_net(1);
  Drawn drawn{.value = 5 + world.rank};
  TrainingState state{.model = net.ptr(),
                      .items = {{"drawn", per_rank(drawn)}}};
  save_snapshot(path, state);
  drawn.value = 0;
  EXPECT_THAT(load_snapshot(path, state).not_restored, IsEmpty());
  EXPECT_EQ(drawn.value, 5 + world.rank);
  // Another number of ranks does not take it, nor one that is that of all.
  const auto alone = new_group({0});
  if (world.rank == 0) {
    drawn.value = 0;
    EXPECT_THAT(load_snapshot(path, state, {.group = alone}).not_restored,
                ElementsAre("drawn"));
    EXPECT_EQ(drawn.value, 0);
  }
  barrier();
  EXPECT_THAT(message_of([&] {
                load_snapshot((world.folder / "own.pt").string(), state);
              }),
              HasSubstr("each rank has its own state of the item \"drawn\""));
}

// As the stages of a pipeline: a rank lacks parameters that others have.
WORLD_TEST(TrainingItems, RanksMayHaveDifferentParameters, 2) {
  const auto group = init_process_group();
  const std::string path = (world.folder / "stages/").string();
  struct Stage : torch::nn::Module {
    explicit Stage(int rank) {
      own = register_parameter("own" + std::to_string(rank), torch::zeros({3}));
    }
    at::Tensor own;
  };
  const auto model = small_net(1);
  for (auto& parameter : model->parameters()) {
    torch::NoGradGuard no_grad;
    parameter.fill_(1);
  }
  const auto run = [&](bool loads) {
    const auto stage = std::make_shared<Stage>(world.rank);
    const std::shared_ptr<torch::nn::Module> module = stage;
    optim::SGD optimizer({stage->own}, {.lr = 0.1, .momentum = 0.9});
    TrainingState state{.model = model.ptr(),
                        .items = {{"stage", module}, {"steps", optimizer}}};
    if (loads) {
      EXPECT_THAT(load_snapshot(path, state).not_restored, IsEmpty());
    } else {
      stage->own.mutable_grad() = torch::full({3}, 1.0 + world.rank);
      optimizer.step();
      save_snapshot(path, state);
    }
    stage->own.mutable_grad() = torch::ones({3});
    optimizer.step();
    return stage->own.detach().clone();
  };
  const at::Tensor expected = run(false);
  EXPECT_TRUE(expected.equal(run(true)));
}

WORLD_TEST(TrainingItems, MistakesAreNamedBeforeTraining, 1, 2) {
  const auto group = init_process_group();
  torch::manual_seed(1);  // replicas are equal
  auto net = small_net(1);
  auto other = small_net(1);
  optim::SGD of_other(other->parameters(), {.lr = 0.1});
  Curriculum curriculum;
  const std::string path = (world.folder / "mistakes").string();
  for (const char* name : {"", "a.b", "model", "optimizer", "lockstep"}) {
    TrainingState state{.model = net.ptr(), .items = {{name, curriculum}}};
    for (const char* ending : {"/", ".pt"}) {
      EXPECT_THAT(message_of([&] { load_snapshot(path + ending, state); }),
                  HasSubstr("TrainingState.items has the name"));
    }
  }
  TrainingState state{.model = net.ptr(), .items = {{"o", of_other}}};
  EXPECT_THAT(message_of([&] { save_snapshot(path + "/", state); }),
              HasSubstr("the optimizer \"o\" of TrainingState.items"));
  // An optimizer of two modules, and what the error recommends.
  auto both = net->parameters();
  for (auto& each : other->parameters()) both.push_back(each);
  optim::SGD of_both(both, {.lr = 0.1, .momentum = 0.9});
  net->eval();
  other->eval();
  const auto x = torch::ones({2, 6});
  const auto step = [&] {
    of_both.zero_grad();
    (net->forward(x) + other->forward(x)).square().sum().backward();
    of_both.step();
    return both[0].detach().clone();
  };
  step();
  state.items.clear();
  state.items.emplace("other", other);
  state.items.emplace("o", of_both);
  EXPECT_THAT(
      message_of([&] { save_snapshot(path + "/", state); }),
      HasSubstr("register the modules that the optimizer steps in one "));
  const auto parent = std::make_shared<torch::nn::Module>();
  parent->register_module("net", net.ptr());
  parent->register_module("other", other.ptr());
  for (const char* ending : {"_both/", "_both.pt"}) {
    TrainingState of_parent{.model = parent, .items = {{"o", of_both}}};
    save_snapshot(path + ending, of_parent);
    const auto expected = step();
    load_snapshot(path + ending, of_parent);
    EXPECT_TRUE(step().equal(expected));
    load_snapshot(path + ending, of_parent);
  }
  // An object that refuses its state.
  state.items.clear();
  state.items.emplace("c", curriculum);
  save_snapshot(path + "/", state);
  state.items.clear();
  Drawn drawn;
  state.items.emplace("c", drawn);
  save_snapshot(path + "/", state);
  state.items.clear();
  state.items.emplace("c", curriculum);
  const std::string message =
      message_of([&] { load_snapshot(path + "/", state); });
  EXPECT_THAT(message, HasSubstr("there is no level"));
}

// That ranks cannot save together was said by the first save, hours later, and
// a file was saved although only some ranks had an item.
WORLD_TEST(TrainingItems, RanksThatDifferAreNamedBeforeTraining, 2) {
  const auto group = init_process_group();
  torch::manual_seed(1);  // replicas are equal
  const bool is_first = world.rank == 0;
  const auto net = small_net(1);
  const auto wider = small_net(2);
  Curriculum curriculum;
  // Expects the same words before the training, and from a save.
  const auto expect_refusal = [&](const char* ending,
                                  const TrainingState& state,
                                  const std::string& words) {
    const std::string path = (world.folder / "differ").string() + ending;
    TrainingState loaded = state;
    EXPECT_THAT(message_of([&] { load_snapshot(path, loaded); }),
                HasSubstr(words));
    EXPECT_THAT(message_of([&] { SnapshotSaver saver(path, state); }),
                HasSubstr(words));
    EXPECT_THAT(message_of([&] { save_snapshot(path, state); }),
                HasSubstr(words));
  };
  for (const char* ending : {"/", ".pt"}) {
    TrainingState state{.model = net.ptr()};
    if (is_first) state.items.emplace("a", curriculum);
    expect_refusal(ending, state,
                   "the item \"a\" is an object on rank 0, and rank 1 does not "
                   "have it; give TrainingState::items of all ranks the same");
    if (!is_first) state.items.emplace("a", net);
    expect_refusal(ending, state,
                   "the item \"a\" is an object on rank 0, and rank 1 has a "
                   "module");
    state = {.model = is_first ? net.ptr() : wider.ptr()};
    expect_refusal(ending, state, "rank 1 has the tensor \"model.3.");
  }
  TrainingState state{.model = net.ptr()};
  if (is_first) state.items.emplace("a", curriculum);
  if (!is_first) state.items.emplace("a", per_rank(curriculum));
  expect_refusal("/", state, "and rank 1 has an object of each rank");
  state.items.clear();
  optim::SGD one(net->parameters(), {.lr = 0.1});
  const auto parameters = net->parameters();
  const optim::SGDGroup first{.params = {parameters.front()}};
  const optim::SGDGroup rest{
      .params = {parameters.begin() + 1, parameters.end()}};
  optim::SGD two({first, rest}, {.lr = 0.1});
  if (is_first) state.optimizer = &one;
  expect_refusal("/", state, "rank 1 has no optimizer, and rank 0 has one");
  state.optimizer = is_first ? &one : &two;
  expect_refusal("/", state,
                 "the optimizer of rank 1 has 2 parameter groups, and that of "
                 "rank 0 has 1");
  // The values that a load or the training may make equal.
  state.optimizer = &one;
  one.param_groups()[0].options().set_lr(is_first ? 0.1 : 0.2);
  const std::string path = (world.folder / "later/").string();
  EXPECT_FALSE(load_snapshot(path, state));
  SnapshotSaver saver(path, state);
}

// A load of rank 0 made an all_reduce, which met the next one of rank 1's
// program.
WORLD_TEST(TrainingItems, AnItemOfOneRankKeepsTheRanksInStep, 2) {
  const auto group = init_process_group("gloo");
  const std::string path = (world.folder / "one.pt").string();
  torch::manual_seed(1);  // replicas are equal
  const auto net = small_net(1);
  Curriculum curriculum;
  TrainingState state{.model = net.ptr(), .items = {{"a", curriculum}}};
  save_snapshot(path, state);
  if (world.rank == 1) state.items.clear();
  EXPECT_TRUE(load_snapshot(path, state, {.will_save = false}));
  const at::Tensor sum = torch::full({1}, 1 + world.rank, torch::kLong);
  all_reduce(sum);
  EXPECT_EQ(sum.item<int64_t>(), 3);
  // If the item fails, all ranks say so.
  curriculum = {};
  Drawn drawn;
  state.items.clear();
  state.items.emplace("a", drawn);
  save_snapshot(path, state);
  state.items.clear();
  if (world.rank == 0) state.items.emplace("a", curriculum);
  EXPECT_THAT(
      message_of([&] { load_snapshot(path, state, {.will_save = false}); }),
      HasSubstr(world.rank == 0 ? "there is no level" : "was loaded in part"));
}

}  // namespace
}  // namespace lockstep::internal
