// Schedulers without Python: state that is restored in the middle, groups that
// are added later, and mistakes. scheduler_parity_test.cpp compares the values
// with Python's.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/optim/adam.h"
#include "tests/optim/scheduler_cases.h"

namespace lockstep::internal {
namespace {

using namespace testing;          // NOLINT
using namespace lockstep::optim;  // NOLINT
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::optim::OptimizerParamGroup;

template <class Action>
std::string refusal(const Action& action) {
  try {
    action();
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

// Steps a case to the middle, restores it by `restore` into another optimizer
// and scheduler, and compares the rates of both from there on.
using Restore = std::function<void(const Trained& from, const Scheduled& saved,
                                   const Trained& to, const Scheduled& loaded)>;
void expect_restored(const SchedulerCase& one, const Restore& restore) {
  const Trained first(one.adam);
  const Scheduled saved = one.make(*first.optimizer);
  for (int step = 0; step < kMiddle; ++step) {
    if (step == one.adds_group_at) first.add_group();
    saved.step(step);
  }
  const Trained second(one.adam);
  const Scheduled loaded = one.make(*second.optimizer);
  if (one.adds_group_at >= 0) second.add_group();
  restore(first, saved, second, loaded);
  EXPECT_TRUE(loaded.scheduler->state_dict() == saved.scheduler->state_dict());
  for (int step = kMiddle; step < kSteps; ++step) {
    saved.step(step);
    loaded.step(step);
    ASSERT_EQ(second.rates(), first.rates()) << one.name << ", step " << step;
    ASSERT_EQ(second.momenta(), first.momenta()) << one.name;
    ASSERT_EQ(loaded.last_lr(), saved.last_lr()) << one.name;
  }
}

TEST(Schedulers, StateInMemoryGoesOn) {
  for (const SchedulerCase& one : scheduler_cases()) {
    expect_restored(one, [](const auto& from, const auto& saved, const auto& to,
                            const auto& loaded) {
      load_state_dict(*to.optimizer, state_dict(*from.optimizer));
      loaded.scheduler->load_state_dict(saved.scheduler->state_dict());
    });
  }
}

// scheduler_parity_test.cpp does the same with .pt.
TEST(Schedulers, ASafetensorsSnapshotGoesOn) {
  std::string folder =
      std::filesystem::temp_directory_path() / "lockstep-optim-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  for (const SchedulerCase& one : scheduler_cases()) {
    const std::string path = folder + "/" + one.name + ".safetensors";
    expect_restored(one, [&](const auto& from, const auto& saved,
                             const auto& to, const auto& loaded) {
      save_snapshot(path, {.model = from.model.ptr(),
                           .optimizer = from.optimizer.get(),
                           .scheduler = saved.scheduler.get()});
      TrainingState state{.model = to.model.ptr(),
                          .optimizer = to.optimizer.get(),
                          .scheduler = loaded.scheduler.get()};
      ASSERT_TRUE(load_snapshot(path, state));
    });
  }
  std::filesystem::remove_all(folder);
}

// The constructor's options are other ones than those of the state.
TEST(Schedulers, AStateBringsItsHyperparameters) {
  const Trained first(false), second(false);
  OneCycleLR saved(*first.optimizer, {.max_lr = 0.5, .total_steps = 40});
  OneCycleLR loaded(*second.optimizer, {.max_lr = {1, 2}, .total_steps = 90});
  for (int step = 0; step < 10; ++step) saved.step();
  load_state_dict(*second.optimizer, state_dict(*first.optimizer));
  loaded.load_state_dict(saved.state_dict());
  EXPECT_EQ(loaded.last_epoch(), 10);
  for (int step = 0; step < 30; ++step) {
    saved.step();
    loaded.step();
    EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr());
  }
  EXPECT_EQ(second.momenta(), first.momenta());
}

// The rates were infinite, and then not numbers.
TEST(Schedulers, ARateThatIsNotANumberIsRefusedAndNothingChanged) {
  const Trained trained(false);
  auto& optimizer = *trained.optimizer;
  const auto rates = trained.rates();
  EXPECT_THAT(
      refusal([&] {
        OneCycleLR(optimizer,
                   {.max_lr = 0.5, .total_steps = 4, .div_factor = 0});
      }),
      HasSubstr("OneCycleLR: the learning rate of step 0 would be inf"));
  EXPECT_EQ(trained.rates(), rates);
  ExponentialLR scheduler(optimizer, {.gamma = NAN});
  EXPECT_THAT(
      refusal([&] { scheduler.step(); }),
      HasSubstr("ExponentialLR: the learning rate of step 1 would be nan"));
  EXPECT_EQ(trained.rates(), rates);
  EXPECT_EQ(scheduler.last_epoch(), 0);
}

TEST(Schedulers, AStateThatDoesNotFitIsRefusedAndNothingChanged) {
  const auto changed = [](const StateTree& state, const char* name,
                          StateTree value) {
    auto dict = *state.as<StateTree::Dict>();
    dict.set(name, std::move(value));
    return StateTree(dict);
  };
  const auto without = [](const StateTree& state, const char* name) {
    auto dict = *state.as<StateTree::Dict>();
    dict.erase(name);
    return StateTree(dict);
  };
  const auto expect_refused = [](ResumableScheduler& scheduler,
                                 const StateTree& state, const char* why) {
    const StateTree before = scheduler.state_dict();
    EXPECT_THAT(refusal([&] { scheduler.load_state_dict(state); }),
                HasSubstr(why));
    EXPECT_TRUE(scheduler.state_dict() == before) << why;
  };
  const Trained trained(false);
  auto& optimizer = *trained.optimizer;

  StepLR step(optimizer, {.step_size = 3});
  const StateTree good = step.state_dict();
  EXPECT_EQ(refusal([&] { step.load_state_dict(good); }), "");
  expect_refused(step, StateTree(7), "it is not a dict");
  expect_refused(step, without(good, "step_size"),
                 "does not fit this StepLR: step_size is missing");
  expect_refused(step, changed(good, "step_size", 0), "at least 1 is allowed");
  expect_refused(step, changed(good, "step_size", 0.5), "not an integer");
  expect_refused(step, changed(good, "last_epoch", 1e300), "not an integer");
  expect_refused(
      step,
      changed(good, "last_epoch", std::numeric_limits<double>::quiet_NaN()),
      "not an integer");
  expect_refused(step, changed(good, "gamma", "x"), "gamma is not a number");
  expect_refused(step, changed(good, "base_lrs", 0.1), "not a list");
  const StateTree three = StateTree::List{0.1, 0.1, 0.1};
  expect_refused(step, changed(good, "base_lrs", three),
                 "base_lrs has 3 values, the optimizer has 2");
  expect_refused(step, changed(good, "param_groups", three),
                 "not a list of dicts");
  expect_refused(step,
                 changed(good, "param_groups",
                         StateTree::List(3, StateTree(StateTree::Dict()))),
                 "it has 3 parameter groups, the optimizer has 2");
  // A torch of another version may have more.
  EXPECT_EQ(
      refusal([&] { step.load_state_dict(changed(good, "verbose", false)); }),
      "");

  ExponentialLR exponential(optimizer, {.gamma = 0.9});
  expect_refused(exponential, good,
                 "it has step_size, which this kind of scheduler does not");
  MultiStepLR multi(optimizer, {.milestones = {4}});
  expect_refused(multi, changed(multi.state_dict(), "milestones", three),
                 "not a Counter");

  CyclicLR cyclic(optimizer, {.base_lr = 0.1, .max_lr = 0.2});
  const StateTree cycle = cyclic.state_dict();
  expect_refused(cyclic, changed(cycle, "max_lrs", StateTree::List{0.1}),
                 "different lengths");
  expect_refused(cyclic, changed(cycle, "mode", "square"),
                 "mode is not one of triangular, triangular2, exp_range");
  expect_refused(cyclic, changed(cycle, "cycle_momentum", false),
                 "saved with another cycle_momentum");
  expect_refused(cyclic, changed(cycle, "use_beta1", true), "use_beta1");

  OneCycleLR one(optimizer, {.max_lr = 0.1, .total_steps = 10});
  const StateTree phases = one.state_dict();
  expect_refused(one, changed(phases, "_schedule_phases", StateTree::List()),
                 "_schedule_phases are not");
  StateTree::Dict wrong = *(*phases.as<StateTree::Dict>()
                                 ->find("_schedule_phases")
                                 ->as<StateTree::List>())[0]
                               .as<StateTree::Dict>();
  wrong.set("end_lr", "lr");
  expect_refused(
      one,
      changed(phases, "_schedule_phases", StateTree::List{StateTree(wrong)}),
      "_schedule_phases are not");

  SequentialLR sequence(optimizer,
                        {.schedulers = {StepLROptions{.step_size = 3},
                                        ExponentialLROptions{.gamma = 0.9}},
                         .milestones = {5}});
  const StateTree parts = sequence.state_dict();
  expect_refused(sequence, changed(parts, "_schedulers", StateTree::List{good}),
                 "it has 1 schedulers, there are 2");
  expect_refused(sequence,
                 changed(parts, "_schedulers", StateTree::List{good, good}),
                 "does not fit this ExponentialLR");
  expect_refused(sequence, changed(parts, "_milestones", StateTree::List{}),
                 "_milestones has 0 values, there are 1");

  ReduceLROnPlateau plateau(optimizer, {.min_lr = {1e-4, 1e-5}});
  expect_refused(plateau, good, "it has gamma");
  expect_refused(plateau, changed(plateau.state_dict(), "min_lrs", three),
                 "min_lrs has 3 values");
}

TEST(Schedulers, AHostileStateDoesNoHarm) {
  const Trained trained(false);
  CosineAnnealingWarmRestarts restarts(*trained.optimizer,
                                       {.T_0 = 1, .T_mult = 2});
  auto state = *restarts.state_dict().as<StateTree::Dict>();
  const int64_t large = int64_t{1} << 53;
  for (const char* name : {"T_0", "T_mult", "T_i", "T_cur", "last_epoch"}) {
    state.set(name, large);
  }
  restarts.load_state_dict(state);
  for (int step = 0; step < 5; ++step) restarts.step();
  MultiStepLR steps(*trained.optimizer, {.milestones = std::vector<int64_t>()});
  auto counter = *steps.state_dict().as<StateTree::Dict>();
  counter.set("milestones",
              StateTree::Counter{{1, std::numeric_limits<int64_t>::min()}});
  steps.load_state_dict(counter);
  EXPECT_THAT(refusal([&] { steps.step(); }), HasSubstr("would be inf"));
}

TEST(Schedulers, OptionsThatMakeNoSenseAreRefusedAndNothingChanged) {
  const Trained trained(false);
  auto& o = *trained.optimizer;
  const auto before = trained.rates();
  const auto momenta = trained.momenta();
  const std::vector<Schedule> none;
  const std::pair<std::function<void()>, const char*> mistakes[]{
      {[&] { StepLR(o, {.step_size = 0}); }, "StepLR: step_size is 0"},
      {[&] { ConstantLR(o, {.factor = 0}); }, "factor is 0.0"},
      {[&] { ConstantLR(o, {.factor = 1.5}); }, "factor is 1.5"},
      {[&] { LinearLR(o, {.start_factor = 0}); }, "start_factor is 0.0"},
      {[&] { LinearLR(o, {.end_factor = 2}); }, "end_factor is 2.0"},
      {[&] { CosineAnnealingLR(o, {.T_max = 0}); }, "T_max is 0"},
      {[&] { CosineAnnealingWarmRestarts(o, {.T_0 = 0}); }, "T_0 is 0"},
      {[&] { CosineAnnealingWarmRestarts(o, {.T_0 = 1, .T_mult = 0}); },
       "T_mult 0"},
      {[&] { OneCycleLR(o, {.max_lr = 1}); }, "total_steps is 0, epochs 0"},
      {[&] { OneCycleLR(o, {.max_lr = 1, .epochs = 3}); }, "steps_per_epoch 0"},
      {[&] { OneCycleLR(o, {.max_lr = {1, 2, 3}, .total_steps = 5}); },
       "max_lr has 3 values, but the optimizer has 2"},
      {[&] { OneCycleLR(o, {.max_lr = 1, .total_steps = 5, .pct_start = 2}); },
       "pct_start is 2.0"},
      {[&] { CyclicLR(o, {.base_lr = 1, .max_lr = {1}}); },
       "max_lr has 1 values"},
      {[&] { CyclicLR(o, {.base_lr = 1, .max_lr = 2, .step_size_up = 0}); },
       "step_size_up is 0"},
      {[&] { CyclicLR(o, {.base_lr = 1, .max_lr = 2, .max_momentum = {0.9}}); },
       "max_momentum has 1 values"},
      {[&] { LambdaLR(o, {.lr_lambda = LRLambda()}); },
       "lr_lambda is not given"},
      {[&] {
         MultiplicativeLR(o, {.lr_lambda = {[](int64_t) { return 1.0; }}});
       },
       "lr_lambda has 1 functions, but the optimizer has 2"},
      {[&] { SWALR(o, {.swa_lr = 1, .anneal_epochs = -1}); },
       "anneal_epochs is -1"},
      {[&] {
         SequentialLR(
             o, {.schedulers = none, .milestones = std::vector<int64_t>()});
       },
       "0 schedulers and 0 milestones"},
      {[&] {
         SequentialLR(o, {.schedulers = {StepLROptions{.step_size = 1}},
                          .milestones = {1}});
       },
       "1 schedulers and 1 milestones"},
      {[&] {
         const StepLROptions part{.step_size = 1};
         SequentialLR(o,
                      {.schedulers = {part, part, part}, .milestones = {3, 2}});
       },
       "not in ascending order"},
      {[&] {
         const StepLROptions part{.step_size = 1};
         SequentialLR(
             o, {.schedulers = {part,
                                ChainedSchedulerOptions{.schedulers = {part}}},
                 .milestones = {3}});
       },
       "cannot change over to a SequentialLR or"},
      {[&] { ChainedScheduler(o, {.schedulers = none}); }, "has no schedulers"},
      {[&] { ReduceLROnPlateau(o, {.factor = 1}); }, "factor is 1.0"},
      {[&] { ReduceLROnPlateau(o, {.min_lr = {0}}); }, "min_lr has 1 values"},
  };
  for (const auto& [mistake, text] : mistakes) {
    EXPECT_THAT(refusal(mistake), HasSubstr(text));
    EXPECT_EQ(trained.rates(), before) << text;
    EXPECT_EQ(trained.momenta(), momenta) << text;
  }
}

// Python divides by zero.
TEST(Schedulers, APhaseWithoutStepsIsRefused) {
  const Trained trained(false);
  EXPECT_THAT(refusal([&] {
                OneCycleLR(*trained.optimizer,
                           {.max_lr = 1, .total_steps = 4, .pct_start = 0.25});
              }),
              HasSubstr("a phase begins and ends in step 0"));
}

TEST(Schedulers, OneCycleEndsAfterItsSteps) {
  const Trained trained(false);
  OneCycleLR scheduler(*trained.optimizer, {.max_lr = 1, .total_steps = 5});
  for (int step = 0; step < 5; ++step) scheduler.step();
  const StateTree before = scheduler.state_dict();
  const auto rates = trained.rates();
  EXPECT_THAT(refusal([&] { scheduler.step(); }),
              HasSubstr("OneCycleLR: this is step 6 of 5"));
  EXPECT_TRUE(scheduler.state_dict() == before);
  EXPECT_EQ(trained.rates(), rates);
}

TEST(Schedulers, RmspropAndAdamwAreCycledAndAdagradHasNoMomentum) {
  torch::nn::Linear model(2, 1);
  torch::optim::RMSprop rmsprop(model->parameters(), 0.1);
  OneCycleLR scheduler(rmsprop, {.max_lr = 1, .total_steps = 11});
  const auto momentum = [&] {
    return static_cast<torch::optim::RMSpropOptions&>(
               rmsprop.param_groups()[0].options())
        .momentum();
  };
  EXPECT_EQ(momentum(), 0.95);
  for (int step = 0; step < 10; ++step) scheduler.step();
  EXPECT_EQ(momentum(), 0.95);
  optim::AdamW adamw(model->parameters());
  CyclicLR cyclic(adamw, {.base_lr = 1, .max_lr = 2, .max_momentum = 0.7});
  EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(
                adamw.param_groups()[0].options())
                .betas(),
            std::make_tuple(0.7, 0.999));
  torch::optim::Adagrad adagrad(model->parameters(), 0.1);
  EXPECT_THAT(
      refusal([&] { OneCycleLR(adagrad, {.max_lr = 1, .total_steps = 5}); }),
      HasSubstr("set cycle_momentum to false"));
  OneCycleLR plain(adagrad, {.max_lr = 1,
                             .total_steps = 5,
                             .div_factor = 4,
                             .cycle_momentum = false});
  EXPECT_EQ(adagrad.param_groups()[0].options().get_lr(), 0.25);
}

// Formulas from the initial rate start from the one that the group has when the
// scheduler meets it; Python's schedulers fail then.
TEST(Schedulers, AnAddedGroupTakesPart) {
  const auto after = [](auto make, int steps) {
    const Trained trained(false);
    auto scheduler = make(*trained.optimizer);
    for (int step = 0; step < 3; ++step) scheduler.step();
    trained.add_group();
    for (int step = 0; step < steps; ++step) scheduler.step();
    EXPECT_EQ(scheduler.get_last_lr(), trained.rates());
    return trained.rates().back();
  };
  const double pi = std::acos(-1);
  EXPECT_THAT(after(
                  [](auto& o) {
                    return LambdaLR(o, {.lr_lambda = [](int64_t epoch) {
                                      return static_cast<double>(epoch);
                                    }});
                  },
                  1),
              DoubleEq(0.4 * 4));
  EXPECT_THAT(
      after([](auto& o) { return CosineAnnealingWarmRestarts(o, {.T_0 = 10}); },
            2),
      DoubleEq(0.4 * (1 + std::cos(pi * 0.5)) / 2));
  EXPECT_THAT(after(
                  [](auto& o) {
                    return CyclicLR(
                        o, {.base_lr = 1, .max_lr = 2, .step_size_up = 4});
                  },
                  1),
              DoubleEq(2));
  EXPECT_THAT(
      after(
          [](auto& o) {
            return OneCycleLR(
                o, {.max_lr = 2, .total_steps = 11, .pct_start = 5.0 / 11});
          },
          1),
      DoubleEq(2));
  EXPECT_THAT(
      after([](auto& o) { return SWALR(o, {.swa_lr = 3, .anneal_epochs = 5}); },
            2),
      DoubleEq(3));
  EXPECT_THAT(after(
                  [](auto& o) {
                    return SequentialLR(
                        o,
                        {.schedulers = {StepLROptions{.step_size = 2},
                                        LinearLROptions{.start_factor = 0.5}},
                         .milestones = {5}});
                  },
                  2),
              // StepLR has a decay in epoch 4, which LinearLR does not know.
              DoubleEq(0.4 * 0.5));
}

TEST(Schedulers, AListWithoutAValueForAnAddedGroupIsNamed) {
  const Trained trained(false);
  OneCycleLR scheduler(*trained.optimizer,
                       {.max_lr = {1, 2}, .total_steps = 20});
  scheduler.step();
  trained.add_group();
  const auto before = trained.rates();
  EXPECT_THAT(refusal([&] { scheduler.step(); }),
              HasSubstr("max_lr has 2 values, but the optimizer has 3"));
  EXPECT_EQ(trained.rates(), before);
  EXPECT_EQ(scheduler.last_epoch(), 1);
  trained.optimizer->param_groups().pop_back();
  scheduler.step();
  trained.optimizer->param_groups().pop_back();
  EXPECT_THAT(refusal([&] { scheduler.step(); }),
              HasSubstr("has 1 parameter groups, but it had 2"));
}

// The first scheduler had stepped when the second refused the group.
TEST(Schedulers, AChainThatRefusesAnAddedGroupChangesNothing) {
  const SWALROptions list{.swa_lr = {0.01, 0.02}};
  const ChainedSchedulerOptions inner{.schedulers = {list}};
  const SequentialLROptions sequence{
      .schedulers = {inner, StepLROptions{.step_size = 1}}, .milestones = {9}};
  for (const Schedule& part : {Schedule(list), Schedule(sequence)}) {
    const Trained trained(false);
    ChainedScheduler scheduler(
        *trained.optimizer,
        {.schedulers = {ExponentialLROptions{.gamma = 0.5}, part}});
    scheduler.step();
    trained.add_group();
    const auto before = trained.rates();
    const StateTree state = scheduler.state_dict();
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_THAT(refusal([&] { scheduler.step(); }),
                  HasSubstr("swa_lr has 2 values, but the optimizer has 3"));
      EXPECT_EQ(trained.rates(), before);
      EXPECT_TRUE(scheduler.state_dict() == state);
    }
    trained.optimizer->param_groups().pop_back();
    scheduler.step();
    EXPECT_NE(trained.rates()[0], before[0]);
  }
}

TEST(Schedulers, AFunctionThatThrowsChangesNothing) {
  const Trained trained(false);
  LambdaLR scheduler(*trained.optimizer, {.lr_lambda = [](int64_t epoch) {
    if (epoch == 2) throw std::runtime_error("mine");
    return 1.0 / static_cast<double>(1 + epoch);
  }});
  scheduler.step();
  const auto before = trained.rates();
  EXPECT_THROW(scheduler.step(), std::runtime_error);
  EXPECT_EQ(scheduler.last_epoch(), 1);
  EXPECT_EQ(trained.rates(), before);
}

// Regression: the scheduler that a SequentialLR had changed over to had begun.
TEST(Schedulers, AChangeOverThatThrowsChangesNothing) {
  const Trained trained(false);
  bool fails = false;
  const LambdaLROptions own{.lr_lambda = [&fails](int64_t) {
    if (fails) throw std::runtime_error("mine");
    return 0.5;
  }};
  SequentialLR scheduler(
      *trained.optimizer,
      {.schedulers = {StepLROptions{.step_size = 9}, own}, .milestones = {1}});
  const StateTree before = scheduler.state_dict();
  fails = true;
  EXPECT_THROW(scheduler.step(), std::runtime_error);
  EXPECT_TRUE(scheduler.state_dict() == before);
}

// Regression: the momenta were those of the refused step.
TEST(Schedulers, MomentaChangeOnlyWithTheRates) {
  const Trained trained(false);
  const auto momenta = trained.momenta();
  const auto refused = [&](auto&& action) {
    const auto rates = trained.rates();
    EXPECT_THAT(refusal(action), HasSubstr("would be"));
    EXPECT_EQ(trained.rates(), rates);
  };
  refused([&] {
    OneCycleLR(*trained.optimizer,
               {.max_lr = 0.5, .total_steps = 4, .div_factor = 0});
  });
  EXPECT_EQ(trained.momenta(), momenta);
  double factor = NAN;
  const CyclicLROptions options{
      .base_lr = 1, .max_lr = 2, .scale_fn = [&](double) { return factor; }};
  refused([&] { CyclicLR(*trained.optimizer, options); });
  EXPECT_EQ(trained.momenta(), momenta);
  factor = 1;
  CyclicLR scheduler(*trained.optimizer, options);
  const auto first = trained.momenta();
  factor = NAN;
  refused([&] { scheduler.step(); });
  EXPECT_EQ(trained.momenta(), first);
}

// Regression: the epoch of a refused step was left out.
TEST(Schedulers, AWarmRestartThatIsRefusedChangesNothing) {
  const Trained trained(false);
  CosineAnnealingWarmRestarts scheduler(*trained.optimizer, {.T_0 = 2});
  StateTree state = scheduler.state_dict();
  std::get<StateTree::Dict>(state.value).set("eta_min", HUGE_VAL);
  scheduler.load_state_dict(state);
  EXPECT_THAT(refusal([&] { scheduler.step(); }), HasSubstr("would be"));
  EXPECT_TRUE(scheduler.state_dict() == state);
}

TEST(Schedulers, AMetricThatIsNoNumberIsNoImprovement) {
  const Trained trained(false);
  ReduceLROnPlateau plateau(*trained.optimizer, {.patience = 1});
  plateau.step(1);
  plateau.step(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(plateau.num_bad_epochs(), 1);
  EXPECT_EQ(plateau.best(), 1);
  plateau.step(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(trained.rates(), ElementsAre(DoubleEq(0.01), DoubleEq(0.002)));
}

TEST(Schedulers, LinearScalingMultipliesAndWarmsUp) {
  const Trained trained(false);
  const auto warmup =
      scale_lr_linearly(*trained.optimizer, {.scale = 8, .warmup_iters = 10});
  EXPECT_THAT(trained.rates(), ElementsAre(DoubleEq(0.8), DoubleEq(0.16)));
  SequentialLR scheduler(
      *trained.optimizer,
      {.schedulers = {warmup, ExponentialLROptions{.gamma = 0.5}},
       .milestones = {warmup.total_iters}});
  EXPECT_THAT(trained.rates(), ElementsAre(DoubleEq(0.1), DoubleEq(0.02)));
  for (int step = 0; step < 5; ++step) scheduler.step();
  // Half-way from 1/8 to 1.
  EXPECT_NEAR(trained.rates()[0], 0.45, 1e-12);
  for (int step = 0; step < 5; ++step) scheduler.step();
  EXPECT_THAT(trained.rates(), ElementsAre(DoubleEq(0.8), DoubleEq(0.16)));
  scheduler.step();
  EXPECT_THAT(trained.rates(), ElementsAre(DoubleEq(0.4), DoubleEq(0.08)));

  // A smaller batch, and a world of one.
  const Trained other(false);
  EXPECT_EQ(
      scale_lr_linearly(*other.optimizer, {.scale = 0.5, .warmup_iters = 10})
          .start_factor,
      1);
  EXPECT_THAT(other.rates(), ElementsAre(0.05, 0.01));
  EXPECT_EQ(
      scale_lr_linearly(*other.optimizer, {.warmup_iters = 3}).start_factor, 1);
  EXPECT_THAT(other.rates(), ElementsAre(0.05, 0.01));
  EXPECT_THAT(refusal([&] {
                scale_lr_linearly(*other.optimizer, {.warmup_iters = 0});
              }),
              HasSubstr("warmup_iters 0"));
  EXPECT_THAT(refusal([&] {
                scale_lr_linearly(*other.optimizer,
                                  {.scale = -1, .warmup_iters = 3});
              }),
              HasSubstr("scale is -1"));
}

TEST(Schedulers, ASnapshotNeedsTheOptimizerOfTheScheduler) {
  const std::string path =
      std::filesystem::temp_directory_path() / "lockstep-no-such-snapshot.pt";
  const Trained trained(false), other(true);
  StepLR scheduler(*trained.optimizer, {.step_size = 3});
  TrainingState state{.model = trained.model.ptr(), .scheduler = &scheduler};
  EXPECT_THAT(refusal([&] { save_snapshot(path, state); }),
              HasSubstr("TrainingState.scheduler is set, but"));
  EXPECT_THAT(refusal([&] { load_snapshot(path, state); }),
              HasSubstr("TrainingState.scheduler is set, but"));
  torch::optim::SGD one_group(trained.model->parameters(), 0.1);
  state.optimizer = &one_group;
  EXPECT_THAT(refusal([&] { save_snapshot(path, state); }),
              HasSubstr("with 2 parameter groups"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace lockstep::internal
