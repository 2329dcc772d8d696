// A training of several parts that is killed and resumed: TrainingState::items.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/metrics/mean.h"
#include "lockstep/observe/metrics_logger.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/lr_scheduler/step_lr.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using namespace lockstep::internal::testing;

constexpr int64_t kSamples = 48;
constexpr int64_t kBatch = 2;

// A sample that is augmented at random.
struct NoisySamples {
  torch::data::Example<> get(size_t index, SampleSeed seed) const {
    const auto noise = torch::randn({6}, seed.generator());
    return {noise + static_cast<double>(index) / kSamples,
            torch::full({1}, static_cast<double>(index % 3))};
  }
  size_t size() const { return kSamples; }
};

// The program's own part, with numbers and a tensor.
struct Curriculum {
  ItemState state_dict() const {
    StateTree::Dict values;
    values.set("level", level);
    return {.values = values, .tensors = {{"history", history}}};
  }
  void load_state_dict(const ItemState& state) {
    const auto* dict = state.values.as<StateTree::Dict>();
    const StateTree* found = dict ? dict->find("level") : nullptr;
    if (!found) throw std::invalid_argument("there is no level");
    level = *found->as<int64_t>();
    history = state.tensors.at(0).second.clone();
  }
  int64_t level = 0;
  at::Tensor history = torch::zeros({1}, torch::kDouble);
};

struct Drawn {
  at::Tensor state_dict() const { return torch::full({1}, value); }
  void load_state_dict(const at::Tensor& state) {
    value = state.item<int64_t>();
  }
  int64_t value = 0;
};

torch::nn::Sequential small_net(int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Dropout(0.3),
                               torch::nn::BatchNorm1d(8),
                               torch::nn::Linear(8, out));
}

enum class Kind { kPlain, kSharded };

struct Training {
  torch::nn::Sequential net = small_net(1);
  torch::nn::Sequential critic = small_net(2);
  DistributedDataParallel<torch::nn::Sequential> ddp{net};
  DistributedDataParallel<torch::nn::Sequential> critic_ddp{critic};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  optim::SGD critic_optimizer{critic->parameters(),
                              {.lr = 0.05, .momentum = 0.9}};
  optim::StepLR critic_scheduler{critic_optimizer, {.step_size = 3}};
  AveragedModel<torch::nn::Sequential> ema{net,
                                           {.avg_fn = get_ema_avg_fn(0.7)}};
  GradScaler scaler{{.device = torch::kCPU, .growth_interval = 3}};
  metrics::Mean mean;
  NoisySamples samples;
  DistributedSampler sampler{kSamples};
  MetricsLogger log;
  Curriculum curriculum;
  TrainingState state;

  explicit Training(const std::string& log_path, Kind kind = Kind::kPlain,
                    bool with_metric = true)
      : log(log_path, {.every_rank = true}) {
    if (kind == Kind::kPlain) {
      optimizer = std::make_unique<optim::AdamW>(
          net->parameters(), optim::AdamWOptions{.lr = 0.01});
    } else {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
          net->parameters(), optim::AdamWOptions{.lr = 0.01});
    }
    state = {.model = net.ptr(),
             .optimizer = optimizer.get(),
             .items = {{"critic", critic.ptr()},
                       {"critic_optimizer", critic_optimizer},
                       {"critic_scheduler", critic_scheduler},
                       {"ema", ema},
                       {"scaler", scaler},
                       {"sampler", sampler},
                       {"log", log},
                       {"curriculum", curriculum}}};
    if (with_metric) state.items.emplace("mean", mean);
  }

  // Goes on until `steps` steps were made in all. Draws from the generator of
  // each rank, too.
  void train(int64_t steps, SnapshotSaver* saver = nullptr) {
    for (int64_t epoch = state.next_epoch(); state.step < steps; ++epoch) {
      sampler.set_epoch(epoch);
      DataLoader loader(samples, sampler, {.batch_size = kBatch});
      for (auto& batch : loader) {
        optimizer->zero_grad();
        critic_optimizer.zero_grad();
        auto loss = (ddp(batch.data) - batch.target).square().mean();
        scaler.scale(loss).backward();
        scaler.step(*optimizer);
        scaler.update();
        critic_ddp(batch.data).square().mean().backward();
        critic_optimizer.step();
        critic_scheduler.step();
        ema.update_parameters(net);
        mean.update(loss.item<double>(), kBatch);
        ++curriculum.level;
        ++state.step;
        // Equal on all ranks, since that of the first one is saved.
        curriculum.history = torch::cat(
            {curriculum.history,
             torch::full({1},
                         scaler.get_scale() / static_cast<double>(state.step),
                         torch::kDouble)});
        log.log({{"loss", loss.item<double>()}}, state.step);
        if (saver && saver->is_due()) saver->save();
        if (state.step == steps) return;
      }
      state.epochs_run = epoch;
    }
  }

  std::string log_text() {
    log.flush();
    return read_file(log.path());
  }
};

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
void expect_resumed(const World& world, const std::string& name, Kind kind,
                    bool with_metric) {
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
  expect_resumed(world, "fold/", Kind::kPlain, true);
  expect_resumed(world, "zero/", Kind::kSharded, true);
  expect_resumed(world, "a.pt", Kind::kPlain, world.size == 1);
  expect_resumed(world, "b.safetensors", Kind::kPlain, world.size == 1);
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
  // Ranks that have other items.
  if (world.size > 1) {
    for (const bool has_other : {false, true}) {
      state.items.clear();
      if (world.rank == 0) state.items.emplace("a", curriculum);
      if (world.rank > 0 && has_other) {
        state.items.emplace("a", per_rank(curriculum));
      }
      EXPECT_THAT(
          message_of([&] { save_snapshot(path + "/", state); }),
          AllOf(HasSubstr("the item \"a\" is an object on rank 0, and rank 1 "),
                HasSubstr(has_other ? "has an object of each rank"
                                    : "does not have it")));
    }
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

}  // namespace
}  // namespace lockstep::internal
