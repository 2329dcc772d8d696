// Trainings that were resumed as if they had just begun, because snapshots had
// nothing of it: the averager's step of a PostLocalSGDOptimizer, the steps that
// post_local_sgd_hook() has counted, PowerSGD's memory, and the momenta of
// optimizers in backward.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::World;

// Layers of equal shape, so that memory of the wrong layer would fit.
torch::nn::Sequential equal_layers() {
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) {
    net->push_back(torch::nn::Linear(16, 16));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

struct HookTraining {
  torch::nn::Sequential net = equal_layers();
  // Several buckets.
  DistributedDataParallel<torch::nn::Sequential> model{
      net, {.bucket_cap_mb = 0.002}};
  std::shared_ptr<torch::optim::Optimizer> optimizer =
      std::make_shared<optim::SGD>(net->parameters(),
                                   optim::SGDOptions{.lr = 0.1});
  TrainingState state{.model = net.ptr()};

  void train(const World& world, int64_t steps) {
    for (; state.step < steps; ++state.step) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(
          static_cast<uint64_t>(100 * state.step + world.rank));
      const auto x = torch::randn({8, 16}, generator);
      optimizer->zero_grad();
      (model(x) - x.roll(1, 1)).square().mean().backward();
      optimizer->step();
    }
  }
  at::Tensor flat() const {
    return torch::nn::utils::parameters_to_vector(net->parameters())
        .detach()
        .clone();
  }
};

// Makes a run of `end` steps, and one that is resumed at `middle` from a
// snapshot that was itself saved right after loading.
template <class Training>
void expect_same_bits(const World& world, const std::string& name,
                      int64_t middle, int64_t end) {
  const auto path = [&](const char* which) {
    return (world.folder / (which + name)).string();
  };
  Training whole;
  whole.train(world, middle);
  save_snapshot(path("first_"), whole.state);
  whole.train(world, end);
  {
    Training loaded;
    EXPECT_THAT(load_snapshot(path("first_"), loaded.state).not_restored,
                IsEmpty());
    save_snapshot(path("second_"), loaded.state);
  }
  Training resumed;
  const testing::KeptWarnings warnings;
  EXPECT_THAT(load_snapshot(path("second_"), resumed.state).not_restored,
              IsEmpty());
  EXPECT_EQ(resumed.state.step, middle);
  resumed.train(world, end);
  EXPECT_TRUE(resumed.flat().equal(whole.flat())) << name;
  EXPECT_THAT(warnings.texts(), IsEmpty());

  // Without the items the bits are others, so they matter.
  Training without;
  without.state.items.clear();
  without.state.optimizer = nullptr;
  load_snapshot(path("second_"), without.state);
  without.train(world, end);
  EXPECT_FALSE(without.flat().equal(whole.flat())) << name;
}

struct PowerSgdTraining : HookTraining {
  explicit PowerSgdTraining(bool same_shapes = false)
      : memory(std::make_shared<PowerSGDState>(
            PowerSGDOptions{.matrix_approximation_rank = 2,
                            .start_power_sgd_iter = 3,
                            .batch_tensors_with_same_shape = same_shapes})) {
    model.register_comm_hook(power_sgd_hook(memory));
    state.optimizer = optimizer.get();
    state.items.emplace("power_sgd", *memory);
  }
  std::shared_ptr<PowerSGDState> memory;
};
struct BatchedShapes : PowerSgdTraining {
  BatchedShapes() : PowerSgdTraining(true) {}
};

// The buckets of a new wrapper's first step are others than those in which the
// memory was saved.
WORLD_TEST(HookResume, PowerSgdGoesOnWithItsMemory, 2) {
  auto group = init_process_group();
  {
    PowerSgdTraining training;
    const auto first = training.model.bucket_names();
    training.train(world, 2);
    EXPECT_NE(training.model.bucket_names(), first);
    EXPECT_GT(training.model.bucket_names().size(), 1u);
  }
  expect_same_bits<PowerSgdTraining>(world, "plain/", 6, 10);
  expect_same_bits<BatchedShapes>(world, "batched/", 6, 10);
  expect_same_bits<PowerSgdTraining>(world, "before/", 2, 6);
}

// Another bucket of the same size got the memory.
WORLD_TEST(HookResume, PowerSgdsMemoryFollowsItsParameters, 2) {
  auto group = init_process_group();
  PowerSgdTraining training;
  training.train(world, 6);
  const auto memory_of = [&](const std::string& name) {
    for (const auto& [key, tensor] : training.memory->state_dict().tensors) {
      if (key == "error." + name) return tensor.clone();
    }
    return at::Tensor();
  };
  const auto before = memory_of("0.weight");
  ASSERT_TRUE(before.defined());
  training.net[0]->as<torch::nn::Linear>()->weight.requires_grad_(false);
  training.train(world, 7);
  EXPECT_TRUE(memory_of("0.weight").equal(before)) << "it was not trained";
  EXPECT_FALSE(memory_of("2.weight").equal(before));
  training.net[0]->as<torch::nn::Linear>()->weight.requires_grad_(true);
  training.train(world, 8);
  EXPECT_FALSE(memory_of("0.weight").equal(before));
}

WORLD_TEST(HookResume, AStateThatDoesNotFitIsRefused, 1) {
  auto group = init_process_group();
  PowerSGDState memory;
  memory.iter = 5;
  EXPECT_THAT(message_of([&] { memory.load_state_dict({}); }),
              HasSubstr("PowerSGDState: \"iter\" of the state is missing"));
  auto saved = memory.state_dict();
  saved.tensors.clear();
  EXPECT_THAT(message_of([&] { memory.load_state_dict(saved); }),
              HasSubstr("\"rng\" of the state is missing or wrong"));
  EXPECT_EQ(memory.iter, 5);
  PeriodicModelAverager averager;
  EXPECT_THAT(message_of([&] { averager.load_state_dict({{"iter", 1}}); }),
              HasSubstr("ModelAverager: the state has no entry \"step\""));
  torch::nn::Linear net(2, 2);
  EXPECT_THAT(message_of([&] { per_rank(StateItem(net)); }),
              HasSubstr("per_rank() was given a module; give an optimizer"));
  optim::SGD steps(net->parameters(), {.momentum = 0.9});
  optim::SGD fewer(std::vector<at::Tensor>{net->weight}, {.momentum = 0.9});
  const auto state = per_rank(StateItem(steps)).state_dict();
  EXPECT_THAT(
      message_of([&] { per_rank(StateItem(fewer)).prepare_load(state); }),
      HasSubstr("its group 0 has other parameters than the optimizer's"));
  EXPECT_THAT(message_of([&] { per_rank(StateItem(steps)).prepare_load({}); }),
              HasSubstr("it is not the state of an optimizer"));
  PostLocalSGDState local({.post_local_gradient_allreduce = false});
  EXPECT_THAT(message_of([&] { local.load_state_dict({{"step", 1}}); }),
              HasSubstr("PostLocalSGDState: the state has no entry \"iter\""));
}

enum class Saved { kOptimizer, kItem, kAverager, kOfEachRank };

template <Saved saved>
struct LocalTraining : HookTraining {
  LocalTraining() {
    if constexpr (saved == Saved::kOfEachRank) {
      optimizer = std::make_shared<optim::SGD>(
          net->parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
    }
    model.register_comm_hook(post_local_sgd_hook(local));
    state.items.emplace("local_sgd", *local);
    if constexpr (saved == Saved::kAverager) {
      state.optimizer = optimizer.get();
      state.items.emplace("averager", *averager);
    }
    optimizer = std::make_shared<PostLocalSGDOptimizer>(optimizer, averager);
    if constexpr (saved == Saved::kOptimizer) state.optimizer = optimizer.get();
    if constexpr (saved == Saved::kItem) {
      state.items.emplace("local", *optimizer);
    }
    if constexpr (saved == Saved::kOfEachRank) {
      state.items.emplace("local", per_rank(*optimizer));
    }
  }
  std::shared_ptr<PostLocalSGDState> local =
      std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{
          .start_local_sgd_iter = 3, .post_local_gradient_allreduce = false});
  std::shared_ptr<ModelAverager> averager =
      std::make_shared<PeriodicModelAverager>(
          PeriodicModelAveragerOptions{.period = 2, .warmup_steps = 3});
};

// Steps 3, 5, 7 average, counted from 0.
WORLD_TEST(HookResume, PostLocalSgdGoesOnWithItsSteps, 2) {
  auto group = init_process_group();
  expect_same_bits<LocalTraining<Saved::kOptimizer>>(world, "a/", 6, 10);
  expect_same_bits<LocalTraining<Saved::kOptimizer>>(world, "b.pt", 6, 10);
  expect_same_bits<LocalTraining<Saved::kOptimizer>>(world, "c.safetensors", 6,
                                                     10);
  expect_same_bits<LocalTraining<Saved::kItem>>(world, "d/", 6, 10);
  expect_same_bits<LocalTraining<Saved::kItem>>(world, "e.pt", 6, 10);
  expect_same_bits<LocalTraining<Saved::kAverager>>(world, "f/", 6, 10);
}

// Snapshots had the momenta of the first rank only.
WORLD_TEST(HookResume, PostLocalSgdGoesOnWithTheMomentaOfEachRank, 2) {
  auto group = init_process_group();
  expect_same_bits<LocalTraining<Saved::kOfEachRank>>(world, "a/", 6, 10);
}

struct InBackwardTraining : HookTraining {
  InBackwardTraining() {
    model.apply_optimizer_in_backward([](std::vector<at::Tensor> parameters) {
      return std::make_unique<optim::SGD>(
          std::move(parameters), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
    });
    for (auto* in_backward : model.get_in_backward_optimizers()) {
      state.items.emplace("optimizer" + std::to_string(state.items.size()),
                          *in_backward);
    }
  }
};

WORLD_TEST(HookResume, OptimizersInBackwardGoOnWithTheirMomenta, 2) {
  auto group = init_process_group();
  expect_same_bits<InBackwardTraining>(world, "a/", 3, 6);
  expect_same_bits<InBackwardTraining>(world, "b.pt", 3, 6);
  EXPECT_EQ(InBackwardTraining().model.get_in_backward_optimizers().size(), 8);
}

}  // namespace
}  // namespace lockstep::internal
