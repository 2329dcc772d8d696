#include "lockstep/checkpoint/optimizer_state.h"

#include <gmock/gmock.h>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
namespace optim = torch::optim;

using Params = std::vector<at::Tensor>;
using MakeOptimizer = std::unique_ptr<optim::Optimizer> (*)(Params);
struct Case {
  const char* name;
  MakeOptimizer make;
};
template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer> make(Params params, const Options& options) {
  return std::make_unique<Optimizer>(std::move(params), options);
}
const Case kCases[] = {
    {"Sgd",
     [](Params p) { return make<optim::SGD>(p, optim::SGDOptions(0.1)); }},
    {"SgdNesterov",
     [](Params p) {
       return make<optim::SGD>(
           p, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
     }},
    {"Adam",
     [](Params p) { return make<optim::Adam>(p, optim::AdamOptions(0.01)); }},
    {"AdamAmsgrad",
     [](Params p) {
       return make<optim::Adam>(
           p, optim::AdamOptions(0.01).amsgrad(true).betas({0.8, 0.95}));
     }},
    {"AdamW",
     [](Params p) { return make<optim::AdamW>(p, optim::AdamWOptions(0.01)); }},
    {"RmsPropCentered",
     [](Params p) {
       return make<optim::RMSprop>(
           p, optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
     }},
    {"Adagrad",
     [](Params p) {
       return make<optim::Adagrad>(p,
                                   optim::AdagradOptions(0.1).lr_decay(0.01));
     }},
};

// Dropout draws from the generator; batch norm has buffers.
torch::nn::Sequential build() {
  return torch::nn::Sequential(
      torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
      torch::nn::Dropout(0.5),
      torch::nn::Linear(torch::nn::LinearOptions(16, 3).bias(false)));
}

void train(torch::nn::Sequential& model, optim::Optimizer& optimizer,
           int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    const auto data =
        torch::linspace(-1, 1 + 0.1 * double(step), 32).view({4, 8});
    optimizer.zero_grad();
    model->forward(data).square().mean().backward();
    optimizer.step();
  }
}

using Parameter = std::tuple<const char*, Case>;
class Resume : public ::testing::TestWithParam<Parameter> {};

INSTANTIATE_TEST_SUITE_P(
    , Resume,
    ::testing::Combine(::testing::Values("a.pt", "a.safetensors"),
                       ::testing::ValuesIn(kCases)),
    [](const auto& test) {
      return std::string(std::get<1>(test.param).name) +
             (std::string(std::get<0>(test.param)) == "a.pt" ? "Pt"
                                                             : "Safetensors");
    });

TEST_P(Resume, IsBitIdenticalToARunWithoutInterruption) {
  const auto& [name, kind] = GetParam();
  const TemporaryFolder folder;
  auto generator = at::detail::getDefaultCPUGenerator();
  torch::manual_seed(3);
  auto model = build();
  auto optimizer = kind.make(model->parameters());
  train(model, *optimizer, 0, 5);
  Snapshot saved;
  saved.model_state = state_dict(*model);
  saved.optimizer_state = state_dict(*optimizer);
  saved.generator_states = {generator.get_state()};
  save_snapshot_file(folder.file(name), saved);
  train(model, *optimizer, 5, 10);

  torch::manual_seed(99);
  auto resumed = build();
  auto fresh = kind.make(resumed->parameters());
  const Snapshot read = load_snapshot_file(folder.file(name));
  load_state_dict(*resumed, read.model_state);
  load_state_dict(*fresh, *read.optimizer_state);
  generator.set_state(read.generator_states[0]);
  train(resumed, *fresh, 5, 10);

  Snapshot one;
  one.model_state = state_dict(*model);
  one.optimizer_state = state_dict(*optimizer);
  Snapshot two;
  two.model_state = state_dict(*resumed);
  two.optimizer_state = state_dict(*fresh);
  EXPECT_TRUE(same_snapshot(one, two));
}

TEST(OptimizerState, HyperparametersComeBackPerGroup) {
  const Params params{torch::zeros(1, torch::requires_grad()),
                      torch::zeros(1, torch::requires_grad())};
  const auto grouped = [&](double first, double second) {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params{params[0]},
                        std::make_unique<optim::SGDOptions>(first));
    groups.emplace_back(Params{params[1]},
                        std::make_unique<optim::SGDOptions>(second));
    return optim::SGD(groups, optim::SGDOptions(1));
  };
  optim::SGD other = grouped(3, 4);
  load_state_dict(other, state_dict(grouped(0.5, 0.25)));
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.25);
}

// Parameters of one shape, as the projections of an attention are.
struct Projections : torch::nn::Module {
  explicit Projections(const std::vector<const char*>& names) {
    for (const char* name : names) {
      register_parameter(name, torch::zeros({2, 2}));
    }
  }
};

at::Tensor moment(optim::Optimizer& optimizer, torch::nn::Module& model,
                  const char* name) {
  const at::Tensor param = model.named_parameters()[name];
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return {};
  return static_cast<optim::AdamParamState&>(*found->second).exp_avg();
}

// After a step each parameter's first moment is 0.1 times its letter's number.
void step_by_letter(optim::Optimizer& optimizer,
                    const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    item.value().mutable_grad() =
        torch::full_like(item.value(), item.key()[0] - 'a' + 1);
  }
  optimizer.step();
}

void expect_moments(optim::Optimizer& optimizer, torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    const auto mean =
        moment(optimizer, model, item.key().c_str()).mean().item<double>();
    EXPECT_NEAR(mean, 0.1 * (item.key()[0] - 'a' + 1), 1e-6) << item.key();
  }
}

// State was put on other parameters of the same shape.
TEST(OptimizerState, SnapshotsHaveTheNamesOfParameters) {
  const TemporaryFolder folder;
  const auto model =
      std::make_shared<Projections>(std::vector<const char*>{"q", "k", "v"});
  optim::Adam adam(model->parameters(), optim::AdamOptions(0.1));
  step_by_letter(adam, *model);
  const auto other =
      std::make_shared<Projections>(std::vector<const char*>{"k", "v", "q"});
  for (const char* name : {"a.pt", "a.safetensors", "folder/"}) {
    const std::string path = folder.file(name);
    save_snapshot(path, {.model = model, .optimizer = &adam});
    optim::Adam loaded(other->parameters(), optim::AdamOptions(0.1));
    TrainingState state{.model = other, .optimizer = &loaded};
    ASSERT_TRUE(load_snapshot(path, state)) << name;
    expect_moments(loaded, *other);
    // The same for what is read from the file.
    optim::Adam read(other->parameters(), optim::AdamOptions(0.1));
    const auto saved = *load_snapshot_file(path).optimizer_state;
    EXPECT_THAT(saved.param_groups.at(0).param_names,
                ::testing::ElementsAre("q", "k", "v"));
    load_state_dict(read, saved, *other);
    expect_moments(read, *other);
  }
}

TEST(OptimizerState, WithoutNamesTheOrderOfTheModelMustBeTheSame) {
  const TemporaryFolder folder;
  const auto model =
      std::make_shared<Projections>(std::vector<const char*>{"q", "k", "v"});
  optim::Adam adam(model->parameters(), optim::AdamOptions(0.1));
  step_by_letter(adam, *model);
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const std::string path = folder.file(name);
    save_snapshot_file(path, {.model_state = state_dict(*model),
                              .optimizer_state = state_dict(adam)});
    optim::Adam same(model->parameters(), optim::AdamOptions(0.1));
    TrainingState state{.model = model, .optimizer = &same};
    ASSERT_TRUE(load_snapshot(path, state));
    expect_moments(same, *model);
    const auto other =
        std::make_shared<Projections>(std::vector<const char*>{"q", "v", "k"});
    optim::Adam reordered(other->parameters(), optim::AdamOptions(0.1));
    state = {.model = other, .optimizer = &reordered};
    EXPECT_THAT(message_of([&] { load_snapshot(path, state); }),
                AllOf(HasSubstr("has numbers instead of the parameters' names"),
                      HasSubstr("k was before v")));
    EXPECT_TRUE(reordered.state().empty());
    EXPECT_THAT(message_of([&] {
                  load_state_dict(reordered,
                                  *load_snapshot_file(path).optimizer_state,
                                  *other);
                }),
                HasSubstr("has numbers instead of the parameters' names"));
  }
}

TEST(OptimizerState, NamesThatDoNotFitAreNamed) {
  Projections model({"q", "k"});
  optim::Adam adam(model.parameters(), optim::AdamOptions(0.1));
  step_by_letter(adam, model);
  const auto refusal = [&](const std::vector<const char*>& names,
                           const OptimizerState& state) {
    Projections other(names);
    optim::Adam loaded(other.parameters(), optim::AdamOptions(0.1));
    return message_of([&] { load_state_dict(loaded, state, other); });
  };
  const OptimizerState good = state_dict(adam, model);
  EXPECT_EQ(refusal({"k", "q"}, good), "");
  EXPECT_THAT(refusal({"q", "o"}, good), HasSubstr("its group 0 lacks o"));
  EXPECT_THAT(refusal({"q"}, good),
              HasSubstr("its group 0 has k, the optimizer's does not"));
  OptimizerState bad = good;
  bad.param_groups[0].param_names = {"q", "q"};
  EXPECT_THAT(refusal({"q", "k"}, bad), HasSubstr("its group 0 lacks k"));
  bad.param_groups[0].param_names = {"q"};
  EXPECT_THAT(refusal({"q", "k"}, bad), HasSubstr("2 parameters and 1 names"));
  OptimizerState wrapped = good;
  for (auto& name : wrapped.param_groups[0].param_names) {
    name = "module." + name;
  }
  EXPECT_EQ(refusal({"k", "q"}, wrapped), "");
}

// Parameters that no model has (of a loss) keep their order in the group.
TEST(OptimizerState, ParametersThatAreNotTheModelsHaveNoNames) {
  Projections model({"q", "k"});
  const auto scale = torch::zeros({2, 2}).requires_grad_();
  optim::Adam adam(
      {model.named_parameters()["q"], scale, model.named_parameters()["k"]},
      optim::AdamOptions(0.1));
  scale.mutable_grad() = torch::ones_like(scale);
  step_by_letter(adam, model);
  Projections other({"k", "q"});
  const auto own = torch::zeros({2, 2}).requires_grad_();
  optim::Adam loaded(
      {own, other.named_parameters()["k"], other.named_parameters()["q"]},
      optim::AdamOptions(0.1));
  load_state_dict(loaded, state_dict(adam, model), other);
  expect_moments(loaded, other);
  EXPECT_EQ(loaded.state().count(own.unsafeGetTensorImpl()), 1u);
}

TEST(OptimizerState, ForFineTuningItIsLoadedInPart) {
  Projections model({"q", "k", "head"});
  optim::Adam adam(model.parameters(), optim::AdamOptions(0.1));
  step_by_letter(adam, model);
  Projections other({"new", "k", "q"});
  std::vector<optim::OptimizerParamGroup> groups;
  for (const char* name : {"new", "k", "q"}) {
    groups.emplace_back(
        Params{other.named_parameters()[name]},
        std::make_unique<optim::AdamOptions>(name[0] == 'n' ? 0.5 : 0.25));
  }
  optim::Adam loaded(groups, optim::AdamOptions(1));
  const auto left = load_state_dict(loaded, state_dict(adam, model), other,
                                    {.strict = false});
  EXPECT_THAT(left.missing_keys, ::testing::ElementsAre("new"));
  EXPECT_THAT(left.unexpected_keys, ::testing::ElementsAre("head"));
  EXPECT_FALSE(moment(loaded, other, "new").defined());
  EXPECT_NEAR(moment(loaded, other, "k").mean().item<double>(), 1.1, 1e-6);
  EXPECT_NEAR(moment(loaded, other, "q").mean().item<double>(), 1.7, 1e-6);
  EXPECT_EQ(loaded.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(loaded.param_groups()[1].options().get_lr(), 0.25);
}

TEST(OptimizerState, WhatDoesNotFitIsNamedAndChangesNothing) {
  auto model = build();
  optim::Adam adam(model->parameters(), optim::AdamOptions(0.5));
  train(model, adam, 0, 1);
  const OptimizerState good = state_dict(adam);

  optim::SGD sgd(model->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_THAT(message_of([&] { load_state_dict(sgd, good); }),
              HasSubstr("does not fit this SGD"));
  optim::AdamW adamw(model->parameters(), optim::AdamWOptions(0.1));
  EXPECT_THAT(message_of([&] { load_state_dict(adamw, good); }),
              HasSubstr("decoupled_weight_decay=False"));
  EXPECT_EQ(adamw.param_groups()[0].options().get_lr(), 0.1);

  OptimizerState bad = good;
  bad.state[1]["exp_avg"] = torch::zeros(5);
  EXPECT_THAT(message_of([&] { load_state_dict(adam, bad); }),
              HasSubstr("parameter 1 has exp_avg of shape [5], the parameter "
                        "has [16]"));
  bad = good;
  bad.state[0].erase("exp_avg_sq");
  EXPECT_THAT(message_of([&] { load_state_dict(adam, bad); }),
              HasSubstr("parameter 0 has no exp_avg_sq"));
  bad = good;
  bad.state[0]["step"] = std::nan("");
  EXPECT_THAT(message_of([&] { load_state_dict(adam, bad); }),
              HasSubstr("step nan"));
  bad = good;
  bad.param_groups[0].options["maximize"] = true;
  EXPECT_THAT(message_of([&] { load_state_dict(adam, bad); }),
              HasSubstr("maximize=True"));
  bad = good;
  bad.param_groups[0].params.pop_back();
  EXPECT_THAT(message_of([&] { load_state_dict(adam, bad); }),
              HasSubstr("group 0 has 4 parameters, the optimizer's has 5"));
  EXPECT_TRUE(same_optimizer(state_dict(adam), good));
}

// LARS was loaded into SGD, without its trust_coefficient.
TEST(OptimizerState, OptionsThatNobodyKnowsAreRefused) {
  optim::SGD sgd({torch::zeros(1)}, optim::SGDOptions(0.1));
  OptimizerState state = state_dict(sgd);
  auto& options = state.param_groups[0].options;
  // Those of schedulers, and those that choose an implementation.
  for (const char* name :
       {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
        "swa_lr", "foreach", "fused", "capturable"}) {
    options[name] = 1.0;
  }
  options["of_another_release"] = std::monostate();
  load_state_dict(sgd, state);
  options["trust_coefficient"] = 0.001;
  EXPECT_THAT(message_of([&] { load_state_dict(sgd, state); }),
              HasSubstr("does not fit this SGD: it was saved with the option "
                        "trust_coefficient, which this kind of optimizer does "
                        "not have"));
  options.erase("trust_coefficient");
  state.param_groups[0].unreadable = "option of group 0 mode is a str";
  EXPECT_THAT(message_of([&] { load_state_dict(sgd, state); }),
              HasSubstr("mode is a str"));
}

// Python's optimizer, whose module names a tied tensor once, has no number for
// the second.
TEST(OptimizerState, AParameterListedTwiceHasOneNumber) {
  auto first = torch::ones({2}).requires_grad_();
  auto second = torch::ones({3}).requires_grad_();
  const auto options = optim::SGDOptions(0.1).momentum(0.9);
  optim::SGD twice({first, first, second}, options);
  (first.sum() + second.sum()).backward();
  twice.step();
  const auto captured = state_dict(twice);
  EXPECT_EQ(captured.param_groups[0].params, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(captured.state.size(), 2);
  optim::SGD once({first, second}, options);
  load_state_dict(once, captured);
  load_state_dict(twice, state_dict(once));
  EXPECT_EQ(twice.state().size(), 2);
}

TEST(OptimizerState, LbfgsIsRefused) {
  optim::LBFGS lbfgs({torch::zeros(1)}, optim::LBFGSOptions(1));
  EXPECT_THAT(message_of([&] { state_dict(lbfgs); }),
              HasSubstr("SGD, Adam, AdamW, RMSprop and Adagrad can"));
}

TEST(ModuleState, NamesAndOrderArePythons) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state_dict(*build())) {
    names.push_back(name);
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("0.weight", "0.bias", "1.weight", "1.bias",
                                     "1.running_mean", "1.running_var",
                                     "1.num_batches_tracked", "4.weight"));
}

TEST(ModuleState, RestoringWritesInPlace) {
  torch::nn::Linear model(2, 2);
  const auto alias = model->weight.detach().view({4});
  load_state_dict(*model, {{"weight", torch::full({2, 2}, 5.0)},
                           {"bias", torch::zeros(2)}});
  EXPECT_TRUE(torch::equal(alias, torch::full({4}, 5.0)));
  EXPECT_TRUE(model->weight.requires_grad());
}

TEST(ModuleState, NamesOfPythonsWrapperAreTakenWithoutItsPrefix) {
  torch::nn::Linear model(1, 1);
  load_state_dict(*model, {{"module.weight", torch::full({1, 1}, 5.0)},
                           {"module.bias", torch::zeros(1)}});
  EXPECT_EQ(model->weight.item<float>(), 5.0f);
}

TEST(ModuleState, EveryDifferenceIsInOneErrorAndNothingIsChanged) {
  torch::nn::Linear model(2, 2);
  const auto before = model->weight.detach().clone();
  EXPECT_THAT(
      message_of([&] {
        load_state_dict(*model, {{"weight", torch::zeros({2, 3})},
                                 {"biass", torch::zeros(2)}});
      }),
      AllOf(HasSubstr("the snapshot lacks bias"),
            HasSubstr("the model lacks biass"),
            HasSubstr("weight (snapshot Float[2, 3], model Float[2, 2])")));
  EXPECT_THAT(message_of([&] {
                load_state_dict(*model,
                                {{"weight", torch::zeros({2, 2})},
                                 {"bias", torch::zeros(2, torch::kDouble)}});
              }),
              HasSubstr("bias (snapshot Double[2], model Float[2])"));
  EXPECT_TRUE(torch::equal(model->weight, before));
}

}  // namespace
}  // namespace lockstep::internal
