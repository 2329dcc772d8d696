#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/lr_scheduler/lr_schedulers.h"
#include "lockstep/parallel/comm_hooks/comm_bytes.h"
#include "lockstep/parallel/model_averaging/averagers.h"
#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::Tensor parameter(double value, const std::vector<int64_t>& sizes = {2}) {
  auto made = torch::full(sizes, value, torch::kFloat);
  made.requires_grad_(true);
  made.mutable_grad() = torch::ones(sizes);
  return made;
}

// Returns the values, in each of `count` steps, of a parameter that holds the
// rank.
std::vector<double> after_steps(ModelAverager& averager, int rank, int count) {
  std::vector<double> values;
  for (int step = 0; step < count; ++step) {
    auto one = parameter(rank);
    averager.average_parameters(std::vector<at::Tensor>{one});
    values.push_back(one[1].item<double>());
  }
  return values;
}

WORLD_TEST(PeriodicModelAverager, AveragesEachPeriodBehindTheWarmup, 2) {
  auto group = init_process_group();
  PeriodicModelAverager averager({.period = 3, .warmup_steps = 2});
  const double own = world.rank;
  EXPECT_THAT(after_steps(averager, world.rank, 7),
              ElementsAre(own, own, 0.5, own, own, 0.5, own));
  EXPECT_EQ(averager.step, 7);
}

WORLD_TEST(PeriodicModelAverager, TakesWhatHasAGradientInItsMemory, 2, 3) {
  auto group = init_process_group();
  PeriodicModelAverager averager({.period = 1});
  const double mean = (world.size - 1) / 2.0;
  auto wide = parameter(world.rank, {2, 3});
  auto strided = torch::full({2, 2}, world.rank, torch::kDouble).t();
  strided.mutable_grad() = torch::ones({2, 2}, torch::kDouble);
  auto half = torch::full({3}, world.rank, torch::kHalf);
  half.mutable_grad() = torch::ones({3}, torch::kHalf);
  auto without = torch::full({2}, world.rank, torch::kFloat);
  auto memory = wide.detach();
  CommBytes sent;
  averager.average_parameters(std::vector<torch::optim::OptimizerParamGroup>{
      torch::optim::OptimizerParamGroup({wide, without}),
      torch::optim::OptimizerParamGroup({strided, half})});
  EXPECT_TRUE(memory.eq(mean).all().item<bool>());
  EXPECT_TRUE(strided.eq(mean).all().item<bool>());
  EXPECT_EQ(half.scalar_type(), torch::kHalf);
  EXPECT_TRUE(half.eq(mean).all().item<bool>());
  EXPECT_TRUE(without.eq(world.rank).all().item<bool>());
  EXPECT_EQ(sent.operations(), 1);
  EXPECT_EQ(sent.bytes(), (6 + 4 + 3) * 8);
}

// module->parameters() names a tied tensor twice; Python's names it once, and
// ranks of both must send equally many elements.
WORLD_TEST(PeriodicModelAverager, AParameterListedTwiceIsSentOnce, 2) {
  auto group = init_process_group();
  PeriodicModelAverager averager({.period = 1});
  auto tied = parameter(world.rank);
  CommBytes sent;
  averager.average_parameters({tied, tied});
  EXPECT_TRUE(tied.eq(0.5).all().item<bool>());
  EXPECT_EQ(sent.bytes(), 2 * 4);
}

WORLD_TEST(PeriodicModelAverager, MistakesAreNamed, 1) {
  auto group = init_process_group();
  EXPECT_THAT([] { PeriodicModelAverager averager({.period = 0}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("period is 0")));
  EXPECT_THAT(
      [] { PeriodicModelAverager averager({.warmup_steps = -1}); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("warmup_steps is -1")));
}

WORLD_TEST(HierarchicalModelAverager, TheLargestPeriodThatDividesAverages, 4) {
  auto group = init_process_group();
  HierarchicalModelAverager averager(
      {.period_group_size_dict = {{2, 2}, {4, 4}}, .warmup_steps = 1});
  const double own = world.rank;
  const double pair = world.rank < 2 ? 0.5 : 2.5;
  // Step 0 belongs to the warm-up.
  EXPECT_THAT(after_steps(averager, world.rank, 9),
              ElementsAre(own, own, pair, own, 1.5, own, pair, own, 1.5));
}

WORLD_TEST(HierarchicalModelAverager, DividesTheGroupItIsGiven, 4) {
  auto all = init_process_group();
  auto half = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
  HierarchicalModelAverager averager(
      {.period_group_size_dict = {{1, 1}, {2, 2}}, .process_group = half});
  EXPECT_THAT(after_steps(averager, world.rank, 2),
              ElementsAre(world.rank % 2 == 0 ? 1 : 2, world.rank));
}

WORLD_TEST(HierarchicalModelAverager, MistakesAreNamed, 2) {
  auto group = init_process_group();
  auto expect = [](std::vector<std::pair<int64_t, int>> levels,
                   const char* words) {
    EXPECT_THAT(
        [&] {
          HierarchicalModelAverager averager(
              {.period_group_size_dict = levels});
        },
        ThrowsMessage<std::invalid_argument>(HasSubstr(words)));
  };
  expect({}, "is empty");
  expect({{0, 2}}, "period 0");
  expect({{4, 1}, {2, 2}}, "period 2 of period_group_size_dict is not above");
  expect({{2, 3}}, "group size 3");
  expect({{2, 1}}, "but process_group has 2 ranks");
}

struct Wrapped {
  explicit Wrapped(int rank, int64_t warmup = 0)
      : weight(parameter(rank)),
        sgd(std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{weight},
                                                1.0)),
        optimizer(sgd, std::make_shared<PeriodicModelAverager>(
                           PeriodicModelAveragerOptions{
                               .period = 2, .warmup_steps = warmup})) {}
  double step() {
    weight.mutable_grad() = torch::ones({2});
    optimizer.step();
    return weight[0].item<double>();
  }
  at::Tensor weight;
  std::shared_ptr<torch::optim::SGD> sgd;
  PostLocalSGDOptimizer optimizer;
};

WORLD_TEST(PostLocalSGDOptimizer, StepsThenAverages, 2) {
  auto group = init_process_group();
  Wrapped wrapped(world.rank, /*warmup=*/1);
  EXPECT_EQ(wrapped.step(), world.rank - 1);
  EXPECT_EQ(wrapped.step(), 0.5 - 2);
  EXPECT_EQ(wrapped.step(), 0.5 - 3);
  wrapped.optimizer.zero_grad();
  EXPECT_FALSE(wrapped.weight.grad().defined());
  auto loss = wrapped.optimizer.step([] { return torch::ones({}); });
  EXPECT_EQ(loss.item<double>(), 1);
}

WORLD_TEST(PostLocalSGDOptimizer, LearningRatesAreSetOnEitherSide, 1) {
  auto group = init_process_group();
  Wrapped wrapped(0);
  torch::optim::StepLR scheduler(wrapped.optimizer, /*step_size=*/1,
                                 /*gamma=*/0.5);
  EXPECT_EQ(wrapped.step(), -1);
  scheduler.step();  // LibTorch's first does nothing
  scheduler.step();
  EXPECT_EQ(wrapped.step(), -1.5);
  wrapped.sgd->param_groups()[0].options().set_lr(2);
  EXPECT_EQ(wrapped.step(), -3.5);
  EXPECT_EQ(wrapped.optimizer.param_groups()[0].options().get_lr(), 2);
}

WORLD_TEST(PostLocalSGDOptimizer, AnArchiveHoldsTheAveragersStep, 1) {
  auto group = init_process_group();
  std::stringstream file;
  Wrapped first(0);
  for (int step = 0; step < 3; ++step) first.step();
  first.sgd->param_groups()[0].options().set_lr(0.25);
  torch::save(first.optimizer, file);
  Wrapped second(0);
  second.step();
  torch::load(second.optimizer, file);
  EXPECT_EQ(second.optimizer.averager().step, 3);
  EXPECT_EQ(second.step(), -1.25);
  std::stringstream plain;
  torch::save(*first.sgd, plain);
  torch::load(second.optimizer, plain);
  EXPECT_EQ(second.optimizer.averager().step, 0);
}

// A training with a scheduler and momentum.
template <class Scheduler, class Options>
struct LocalSgdTraining {
  explicit LocalSgdTraining(const Options& options)
      : scheduler(optimizer, options),
        state{.model = model.ptr(),
              .optimizer = &optimizer,
              .scheduler = &scheduler} {}
  // Returns the rate that each step has used.
  std::vector<double> train(int steps) {
    std::vector<double> rates;
    for (int step = 0; step < steps; ++step) {
      for (auto& p : model->parameters()) {
        p.mutable_grad() = torch::ones_like(p);
      }
      optimizer.step();
      rates.push_back(sgd->param_groups()[0].options().get_lr());
      scheduler.step();
    }
    return rates;
  }
  torch::nn::Linear model{2, 2};
  std::shared_ptr<torch::optim::SGD> sgd = std::make_shared<torch::optim::SGD>(
      model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  PostLocalSGDOptimizer optimizer{sgd,
                                  std::make_shared<PeriodicModelAverager>()};
  Scheduler scheduler;
  TrainingState state;
};

template <class Scheduler, class Options>
void expect_resumed(const testing::World& world, const Options& options) {
  using Run = LocalSgdTraining<Scheduler, Options>;
  for (const char* name : {"file.pt", "file.safetensors", "folder/"}) {
    const std::string path = (world.folder / name).string();
    torch::manual_seed(1);
    Run straight(options);
    straight.train(8);
    save_snapshot(path, straight.state);
    std::stringstream archive;
    torch::save(straight.optimizer, archive);
    const OptimizerState state = state_dict(straight.optimizer);
    const auto expected = straight.train(5);

    Run resumed(options);
    ASSERT_TRUE(load_snapshot(path, resumed.state));
    EXPECT_EQ(resumed.optimizer.averager().step, 8);
    EXPECT_EQ(resumed.train(5), expected) << name;
    EXPECT_TRUE(resumed.model->weight.equal(straight.model->weight)) << name;
    torch::load(resumed.optimizer, archive);
    EXPECT_EQ(resumed.train(1)[0], expected[0]);
    load_state_dict(resumed.optimizer, state);
    EXPECT_EQ(resumed.train(1)[0], expected[0]);
    EXPECT_EQ(resumed.optimizer.param_groups()[0].options().get_lr(),
              resumed.scheduler.get_last_lr()[0]);
  }
}

// A snapshot had the rate of the step before, and after loading it the rate of
// the scheduler's constructor was used.
WORLD_TEST(PostLocalSGDOptimizer, AResumedTrainingGoesOnWithItsRates, 1, 2) {
  auto group = init_process_group();
  expect_resumed<optim::ExponentialLR>(
      world, optim::ExponentialLROptions{.gamma = 0.5});
  expect_resumed<optim::SequentialLR>(
      world, optim::SequentialLROptions{
                 .schedulers = {optim::LinearLROptions{.start_factor = 0.1,
                                                       .total_iters = 5},
                                optim::CosineAnnealingLROptions{.T_max = 20}},
                 .milestones = {5}});
}

// Momenta differ even when the parameters have just been averaged, so no folder
// of snapshots could be saved.
WORLD_TEST(PostLocalSGDOptimizer, IsSavedAfterAnAveraging, 2, 3) {
  auto group = init_process_group();
  for (const char* name : {"file.pt", "file.safetensors", "folder/"}) {
    const std::string path = (world.folder / name).string();
    torch::manual_seed(1);
    torch::nn::Linear model(2, 2);
    model->register_parameter("scale", torch::ones({}));
    PostLocalSGDOptimizer optimizer(
        std::make_shared<torch::optim::SGD>(
            model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        std::make_shared<PeriodicModelAverager>(
            PeriodicModelAveragerOptions{.period = 2}));
    const TrainingState state{.model = model.ptr(), .optimizer = &optimizer};
    // The averager averages in its steps 0, 2, 4.
    for (int step = 0; step < 5; ++step) {
      for (auto& parameter : model->parameters()) {
        parameter.mutable_grad() = torch::full_like(parameter, world.rank);
      }
      optimizer.step();
      const auto said =
          testing::message_of([&] { save_snapshot(path, state); });
      if (step % 2 == 0) {
        EXPECT_EQ(said, "");
      } else {
        EXPECT_THAT(said, HasSubstr("the tensor \"model.bias\" must be equal"));
      }
    }
    const auto saved = load_snapshot_file(path).optimizer_state->state;
    ASSERT_EQ(saved.size(), 3u);
    if (world.rank == 0) {
      const auto momentum = [](const OptimizerState& of) {
        return std::get<at::Tensor>(of.state.at(0).at("momentum_buffer"));
      };
      EXPECT_TRUE(
          momentum({.state = saved}).equal(momentum(state_dict(optimizer))));
    }
    barrier();
  }
}

WORLD_TEST(PostLocalSGDOptimizer, RatesThatBothSidesHaveSetAreRefused, 1) {
  auto group = init_process_group();
  Wrapped wrapped(0);
  const auto rate = [](torch::optim::Optimizer& of) -> auto& {
    return of.param_groups()[0].options();
  };
  rate(wrapped.optimizer).set_lr(2);
  rate(*wrapped.sgd).set_lr(3);
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THAT([&] { wrapped.step(); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(
                    "group 0 was set to 2 here and to 3 in optim()")));
  }
  EXPECT_EQ(wrapped.weight[0].item<double>(), 0);
  rate(*wrapped.sgd).set_lr(2);
  EXPECT_EQ(wrapped.step(), -2);
}

// The group was not given to the other optimizer, so it was not stepped.
WORLD_TEST(PostLocalSGDOptimizer, AnAddedGroupIsSteppedAndAveraged, 2) {
  auto group = init_process_group();
  Wrapped wrapped(world.rank, /*warmup=*/1);
  auto added = parameter(world.rank);
  wrapped.optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({added, added}));
  EXPECT_EQ(wrapped.sgd->param_groups().size(), 2);
  const auto step = [&] {
    added.mutable_grad() = torch::ones({2});
    wrapped.step();
    return added[0].item<double>();
  };
  EXPECT_EQ(step(), world.rank - 1);
  EXPECT_EQ(step(), 0.5 - 2);
  wrapped.optimizer.param_groups()[1].options().set_lr(0.5);
  EXPECT_EQ(step(), 0.5 - 2.5);
  const auto state = state_dict(wrapped.optimizer);
  EXPECT_EQ(state.param_groups.size(), 2);
  load_state_dict(wrapped.optimizer, state);
}

// A rate that equals the default of its class was replaced here by that of the
// first group, and so in the next step there.
WORLD_TEST(PostLocalSGDOptimizer, GroupsKeepTheirRates, 1) {
  auto group = init_process_group();
  const auto with_rate = [](double rate) {
    return torch::optim::OptimizerParamGroup(
        {parameter(0)}, std::make_unique<torch::optim::AdamWOptions>(rate));
  };
  auto adamw = std::make_shared<optim::AdamW>(
      std::vector<torch::optim::OptimizerParamGroup>{with_rate(0.1),
                                                     with_rate(1e-3)},
      optim::AdamWOptions{.lr = 0.5});
  PostLocalSGDOptimizer optimizer(
      adamw, std::make_shared<PeriodicModelAverager>(
                 PeriodicModelAveragerOptions{.period = 1}));
  optimizer.add_param_group(with_rate(1e-3));
  optimizer.step();
  for (const torch::optim::Optimizer* one :
       std::initializer_list<torch::optim::Optimizer*>{&optimizer,
                                                       adamw.get()}) {
    std::vector<double> rates;
    for (const auto& each : one->param_groups()) {
      rates.push_back(each.options().get_lr());
    }
    EXPECT_THAT(rates, ElementsAre(0.1, 1e-3, 1e-3));
  }
}

WORLD_TEST(PostLocalSGDOptimizer, GroupsOfOneSideOnlyAreRefused, 1) {
  auto group = init_process_group();
  const torch::optim::OptimizerParamGroup added({parameter(0)});
  const auto expect_refused = [](Wrapped& wrapped) {
    const auto refuses = ThrowsMessage<std::invalid_argument>(
        HasSubstr("add a group with PostLocalSGDOptimizer::add_param_group()"));
    EXPECT_THAT([&] { wrapped.step(); }, refuses);
    EXPECT_THAT([&] { state_dict(wrapped.optimizer); }, refuses);
    EXPECT_THAT(
        [&] {
          std::stringstream archive;
          torch::save(wrapped.optimizer, archive);
        },
        refuses);
    EXPECT_EQ(wrapped.weight[0].item<double>(), 0);
  };
  Wrapped inner(0), outer(0), other(0);
  inner.sgd->add_param_group(added);
  expect_refused(inner);
  static_cast<torch::optim::Optimizer&>(outer.optimizer).add_param_group(added);
  expect_refused(outer);
  other.sgd->param_groups()[0].params().push_back(parameter(0));
  expect_refused(other);
}

WORLD_TEST(PostLocalSGDOptimizer, MistakesAreNamed, 1) {
  auto group = init_process_group();
  auto averager = std::make_shared<PeriodicModelAverager>();
  EXPECT_THROW(PostLocalSGDOptimizer(nullptr, averager), std::invalid_argument);
  Wrapped wrapped(0);
  EXPECT_THROW(PostLocalSGDOptimizer(wrapped.sgd, nullptr),
               std::invalid_argument);
}

}  // namespace
}  // namespace lockstep::internal
