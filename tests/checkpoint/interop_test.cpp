// Snapshots that go back and forth between Python's torch and this library
// (interop.py is the other half).

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
namespace optim = torch::optim;

// Has no bias right before batch norm: its gradient would be rounding errors
// only, which Adam makes large.
// Uses the default dtype to build in double: to(kDouble) would also convert
// num_batches_tracked, which Python's double() leaves alone.
torch::nn::Sequential build() {
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                              torch::nn::BatchNorm1d(16),
                              torch::nn::Linear(16, 3));
  torch::set_default_dtype(before);
  return model;
}

void train(torch::nn::Sequential& model, optim::Optimizer& optimizer, int from,
           int to) {
  for (int step = from; step < to; ++step) {
    const auto data =
        torch::linspace(-1, 1 + step / 8.0, 32, torch::kDouble).view({4, 8});
    optimizer.zero_grad();
    model->forward(data).square().mean().backward();
    optimizer.step();
  }
}

std::unique_ptr<optim::Optimizer> make(const std::string& name,
                                       torch::nn::Sequential& model) {
  const auto p = model->parameters();
  if (name == "SGD") {
    return std::make_unique<optim::SGD>(
        p, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  }
  if (name == "Adam") {
    return std::make_unique<optim::Adam>(
        p, optim::AdamOptions(0.01).amsgrad(true));
  }
  if (name == "AdamW") {
    return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.01));
  }
  if (name == "RMSprop") {
    return std::make_unique<optim::RMSprop>(
        p, optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
  }
  return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.1));
}
const char* const kOptimizers[] = {"SGD", "Adam", "AdamW", "RMSprop",
                                   "Adagrad"};

// Has names of every kind; interop.py has the same model.
struct Layers : torch::nn::Module {
  Layers() {
    namespace nn = torch::nn;
    const auto words = register_module("words", nn::Embedding(7, 8));
    register_module(
        "convolution",
        nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 2, 3).bias(false)),
                       nn::BatchNorm2d(2), nn::ReLU()));
    register_module(
        "memory",
        nn::LSTM(nn::LSTMOptions(8, 4).num_layers(2).bidirectional(true)));
    register_module("attention", nn::MultiheadAttention(
                                     nn::MultiheadAttentionOptions(8, 2)));
    register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
    const auto out =
        register_module("out", nn::Linear(nn::LinearOptions(8, 7).bias(false)));
    out->named_parameters(false)["weight"].set_data(words->weight);
    register_buffer("mask", torch::ones(3, torch::kBool));
  }
};

at::Tensor expected(size_t index, const at::Tensor& like) {
  return (torch::arange(like.numel()) + static_cast<int64_t>(1000 * index))
      .view(like.sizes())
      .to(like.scalar_type());
}

class PythonInterop : public ::testing::Test {
 protected:
  static void python(const std::string& what) {
    const std::string command =
        std::string(LOCKSTEP_TORCH_PYTHON) + " " + LOCKSTEP_SOURCE_DIR +
        "/tests/checkpoint/interop.py " + what + " " + folder_->file("");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder();
    python("write");
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string file(const std::string& name) {
    return folder_->file(name);
  }
  static TemporaryFolder* folder_;
};
TemporaryFolder* PythonInterop::folder_ = nullptr;

TEST_F(PythonInterop, TheTutorialsFilesAreRead) {
  for (const char* name : {"tutorial.pt", "protocol4.pt", "checkpoint.pt"}) {
    const Snapshot read = load_snapshot_file(file(name));
    auto model = build();
    load_state_dict(*model, read.model_state);
    EXPECT_EQ(read.model_state[0].first, "0.weight");
    EXPECT_EQ(read.epochs_run, std::string(name) == "checkpoint.pt" ? -1 : 10);
    EXPECT_FALSE(read.optimizer_state);
  }
}

TEST_F(PythonInterop, TensorsOfAnyKindAreRead) {
  const Snapshot read = load_snapshot_file(file("tensors.pt"));
  std::map<std::string, at::Tensor> t(read.model_state.begin(),
                                      read.model_state.end());
  const auto base = torch::arange(24, torch::kFloat).view({4, 6});
  EXPECT_TRUE(torch::equal(t.at("transposed"), base.t()));
  EXPECT_TRUE(
      torch::equal(t.at("slice"), base.slice(0, 1, 3).slice(1, 0, 6, 2)));
  EXPECT_TRUE(t.at("same").is_alias_of(t.at("transposed")));
  EXPECT_TRUE(torch::equal(t.at("expanded"), torch::ones(5)));
  EXPECT_TRUE(torch::equal(t.at("parameter"), torch::ones(2)));
  EXPECT_EQ(t.at("half").scalar_type(), torch::kHalf);
  EXPECT_EQ(t.at("bfloat16").scalar_type(), torch::kBFloat16);
  EXPECT_EQ(t.at("int8").scalar_type(), torch::kChar);
  EXPECT_TRUE(t.at("bool")[0].item<bool>());
  EXPECT_EQ(t.at("complex").scalar_type(), torch::kComplexFloat);
  EXPECT_EQ(t.at("uint16").scalar_type(), torch::kUInt16);
  EXPECT_EQ(t.at("uint16").to(torch::kInt)[1].item<int>(), 65535);
  EXPECT_EQ(t.at("empty").sizes(), (at::IntArrayRef{0, 3}));
  EXPECT_EQ(t.at("scalar").item<float>(), 3.5f);
  // Their bits were ignored, so signs were wrong.
  const auto real = torch::arange(4, torch::kFloat);
  EXPECT_TRUE(torch::equal(t.at("conj"), torch::complex(real, -real - 1)));
  EXPECT_TRUE(torch::equal(t.at("neg"), -real - 1));
  EXPECT_EQ(t.at("float8").scalar_type(), torch::kFloat8_e4m3fn);
  EXPECT_EQ(t.at("complex32").scalar_type(), torch::kComplexHalf);
  EXPECT_TRUE(torch::equal(t.at("attributed"), torch::ones(2)));
  EXPECT_TRUE(torch::equal(t.at("buffer"), torch::ones(2)));
  // A snapshot that is saved again has the values, not the memory.
  save_tensors(file("again.pt"),
               {{"conj", t.at("conj")}, {"neg", t.at("neg")}});
  const auto again = load_tensors(file("again.pt"));
  EXPECT_TRUE(torch::equal(again[0].second, t.at("conj")));
  EXPECT_TRUE(torch::equal(again[1].second, t.at("neg")));
}

// Each of these was a reason to refuse the whole file.
TEST_F(PythonInterop, WhatNobodyAsksForIsNoReasonToRefuse) {
  const Snapshot read = load_snapshot_file(file("strange.pt"));
  EXPECT_EQ(read.epochs_run, 3);
  auto model = build();
  load_model(file("strange.pt"), *model);
  EXPECT_THAT(
      message_of([&] {
        load_model(file("strange.pt"), *model, {.key = "arguments"});
      }),
      HasSubstr("entry \"arguments\" is not a state_dict (a dict of tensors "
                "by name): it is an argparse.Namespace; "));
}

// State that no optimizer here has was left out, as if there were none.
TEST_F(PythonInterop, OptimizerStateThatIsNotReadIsNotLoaded) {
  auto model = build();
  load_model(file("lbfgs.pt"), *model);
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
  TrainingState state{.model = model.ptr(), .optimizer = &optimizer};
  EXPECT_THAT(message_of([&] { load_snapshot(file("lbfgs.pt"), state); }),
              HasSubstr("parameter 0's al is a list, which is not read"));
  state.optimizer = nullptr;
  EXPECT_TRUE(load_snapshot(file("lbfgs.pt"), state));
}

// Options of an optimizer of another class were dropped, if the state had all
// options that it shares with ours.
TEST_F(PythonInterop, OnlyTheSameClassOfOptimizerIsLoaded) {
  torch::nn::Sequential model(
      torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
  const auto refusal = [&](const std::string& saved, const std::string& own) {
    const auto optimizer = make(own, model);
    const auto read = load_snapshot_file(file("options-" + saved + ".pt"));
    return message_of(
        [&] { load_state_dict(*optimizer, *read.optimizer_state); });
  };
  const auto classes = nlohmann::json::parse(read_file(file("classes.json")));
  EXPECT_GE(classes.size(), 13u);
  for (const std::string saved : classes) {
    for (const std::string own : kOptimizers) {
      EXPECT_EQ(refusal(saved, own) == "", saved == own) << saved << " " << own;
    }
  }
  for (const char* saved : {"one-cycle", "cyclic", "swa", "named"}) {
    EXPECT_EQ(refusal(saved, "SGD"), "") << saved;
  }
  EXPECT_THAT(refusal("lars", "SGD"),
              HasSubstr("with the option trust_coefficient"));
  EXPECT_THAT(refusal("mode", "SGD"),
              HasSubstr("option of group 0 mode is a str, which is not read"));
}

// A scheduler that takes anything.
struct AnySchedule : ResumableScheduler {
  StateTree state_dict() const override { return StateTree::Dict{}; }
  std::function<void()> prepare_load(const StateTree&) override {
    return [] {};
  }
};

// Each part refused the whole file, although the run does not have it.
TEST_F(PythonInterop, PartsThatAreNotReadAreRefusedOnlyIfTheyAreNeeded) {
  auto model = build();
  TrainingState state{.model = model.ptr(),
                      .epochs_run = 2,
                      .step = 7,
                      .sampler_state = {{"epoch", 3}},
                      .metadata = {{"run", "seventh"}}};
  const KeptWarnings warnings;
  const LoadedSnapshot loaded = load_snapshot(file("unread.pt"), state);
  EXPECT_THAT(loaded.not_used, ElementsAre("optimizer", "scheduler"));
  EXPECT_THAT(loaded.not_restored,
              ElementsAre("generator", "epochs_run", "step", "sampler_state",
                          "metadata"));
  EXPECT_THAT(
      warnings.texts(),
      ElementsAre(HasSubstr("which keep their values: epochs_run, step, "
                            "sampler_state, metadata;")));
  EXPECT_EQ(state.step, 7);
  EXPECT_EQ(state.metadata.at("run"), "seventh");
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
  state.optimizer = &optimizer;
  const auto refusal = [&] {
    return message_of([&] { load_snapshot(file("unread.pt"), state); });
  };
  EXPECT_THAT(refusal(), HasSubstr("a parameter's index is a str, not an int"));
  EXPECT_THAT(message_of([&] {
                save_snapshot_file(file("again.pt"),
                                   load_snapshot_file(file("unread.pt")));
              }),
              HasSubstr("was not read whole"));
  const auto extra = load_snapshot_file(file("extra.pt"));
  EXPECT_THAT(extra.not_tensors, ElementsAre("_extra_state", "0._extra_state"));
  EXPECT_THAT(message_of([&] { save_snapshot_file(file("again.pt"), extra); }),
              HasSubstr("_extra_state is not a tensor"));
  EXPECT_EQ(load_tensors(file("extra.pt")).size(), extra.model_state.size());
  state.optimizer = nullptr;
  EXPECT_THAT(message_of([&] { load_snapshot(file("extra.pt"), state); }),
              HasSubstr("the model lacks _extra_state, 0._extra_state"));
}

TEST_F(PythonInterop, ASchedulersStateThatIsNotReadIsRefusedForAScheduler) {
  auto model = build();
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1));
  AnySchedule schedule;
  TrainingState state{
      .model = model.ptr(), .optimizer = &optimizer, .scheduler = &schedule};
  Snapshot snapshot{.model_state = state_dict(*model),
                    .optimizer_state = state_dict(optimizer)};
  save_snapshot_file(file("scheduled.pt"), snapshot);
  EXPECT_TRUE(load_snapshot(file("scheduled.pt"), state));
  python("spoil-scheduler");
  EXPECT_THAT(
      message_of([&] { load_snapshot(file("scheduled.pt"), state); }),
      HasSubstr("the snapshot's scheduler state is not read: a key of a state "
                "is a float, not a str; "));
  state.scheduler = nullptr;
  EXPECT_TRUE(load_snapshot(file("scheduled.pt"), state));
}

struct Projections : torch::nn::Module {
  explicit Projections(const std::string& names) {
    for (const char name : names) {
      register_parameter(std::string(1, name), torch::zeros({2, 2}));
    }
  }
  // Whether each parameter's first moment is that of interop.py.
  bool has_moments(const optim::Adam& optimizer) const {
    const auto own = named_parameters();
    return std::ranges::all_of(own, [&](const auto& item) {
      const auto& state = static_cast<const optim::AdamParamState&>(
          *optimizer.state().at(item.value().unsafeGetTensorImpl()));
      return std::abs(state.exp_avg().mean().template item<double>() -
                      0.1 * item.key()[0]) < 1e-4;
    });
  }
};

TEST_F(PythonInterop, OptimizerStateOfPythonIsFoundByName) {
  const auto model = std::make_shared<Projections>("vqk");
  for (const char* name : {"optimizer-named.pt", "optimizer-wrapped.pt"}) {
    optim::Adam optimizer(model->parameters());
    TrainingState state{.model = model, .optimizer = &optimizer};
    ASSERT_TRUE(load_snapshot(file(name), state));
    EXPECT_TRUE(model->has_moments(optimizer)) << name;
  }
  optim::Adam optimizer(model->parameters());
  TrainingState state{.model = model, .optimizer = &optimizer};
  EXPECT_THAT(
      message_of([&] { load_snapshot(file("optimizer-numbered.pt"), state); }),
      HasSubstr("has numbers instead of the parameters' names"));
  const auto same = std::make_shared<Projections>("qkv");
  optim::Adam other(same->parameters());
  state = {.model = same, .optimizer = &other};
  ASSERT_TRUE(load_snapshot(file("optimizer-numbered.pt"), state));
  EXPECT_TRUE(same->has_moments(other));
}

TEST_F(PythonInterop, TiedWeightsOfSafetensorsAreLoaded) {
  if (!std::filesystem::exists(file("layers.safetensors"))) {
    GTEST_SKIP() << "Python has no safetensors";
  }
  Layers layers;
  load_model(file("layers.safetensors"), layers);
  const auto loaded = state_dict(layers);
  for (size_t i = 0; i < loaded.size(); ++i) {
    const auto& [name, tensor] = loaded[i];
    const size_t index = name == "words.weight" ? loaded.size() - 1 : i;
    EXPECT_TRUE(torch::equal(tensor, expected(index, tensor))) << name;
  }
}

TEST_F(PythonInterop, AStateDictOfPythonIsLoaded) {
  Layers layers;
  load_model(file("layers.pth"), layers);
  const auto loaded = state_dict(layers);
  // out.weight is tied to words.weight, so it holds the value filled in last.
  ASSERT_EQ(loaded[loaded.size() - 2].first, "norm.bias");
  ASSERT_EQ(loaded.back().first, "out.weight");
  for (size_t i = 0; i < loaded.size(); ++i) {
    const auto& [name, tensor] = loaded[i];
    const size_t index = name == "words.weight" ? loaded.size() - 1 : i;
    EXPECT_TRUE(torch::equal(tensor, expected(index, tensor))) << name;
  }
}

TEST_F(PythonInterop, AStateDictOfOursIsLoadedByPython) {
  Layers layers;
  const auto own = state_dict(layers);
  for (size_t i = 0; i < own.size(); ++i) {
    own[i].second.copy_(expected(i, own[i].second));
  }
  save_model(file("cpp-layers.pth"), layers);
  python("check-state-dict");
}

// {'model': ..., 'epoch': ...}, which is how most programs save.
TEST_F(PythonInterop, AnEntryOfADictIsLoadedByItsKey) {
  auto model = build();
  const std::string path = file("entries.pt");
  EXPECT_THAT(
      message_of([&] { load_model(path, *model); }),
      HasSubstr("its \"model\" is a dict; its keys are model, optimizer, "
                "epoch, loss, arguments; name one of its state_dicts "
                "(load_model() has the option key)"));
  EXPECT_THAT(message_of([&] { load_model(path, *model, {.key = "net"}); }),
              HasSubstr("the file has no entry \"net\"; its entries are model, "
                        "optimizer, epoch, loss, arguments"));
  EXPECT_THAT(message_of([&] { load_model(path, *model, {.key = "epoch"}); }),
              HasSubstr("entry \"epoch\" is not a state_dict"));
  load_model(path, *model, {.key = "model"});
  const auto expected = load_snapshot_file(file("checkpoint.pt")).model_state;
  const auto loaded = state_dict(*model);
  for (size_t i = 0; i < loaded.size(); ++i) {
    EXPECT_TRUE(torch::equal(loaded[i].second, expected[i].second));
  }
}

TEST_F(PythonInterop, HalfWeightsOfPythonAreConverted) {
  for (const char* name : {"half.pt", "bfloat16.pt", "float.pt"}) {
    auto model = build();
    EXPECT_THROW(load_model(file(name), *model), std::invalid_argument);
    load_model(file(name), *model, {.convert = true});
    const auto expected =
        load_snapshot_file(file("converted-" + std::string(name)));
    const auto loaded = state_dict(*model);
    for (size_t i = 0; i < loaded.size(); ++i) {
      EXPECT_TRUE(
          torch::equal(loaded[i].second, expected.model_state[i].second))
          << name << " " << loaded[i].first;
    }
  }
}

// Expects what Python's load_state_dict(strict=False) returns for the same
// files.
TEST_F(PythonInterop, WhatIsLeftOutIsWhatPythonLeavesOut) {
  const auto said = nlohmann::json::parse(read_file(file("incompatible.json")));
  for (const char* name : {"fewer.pt", "more.pt", "others.pt", "extra.pt"}) {
    auto model = build();
    EXPECT_THROW(load_model(file(name), *model), std::invalid_argument);
    const auto left = load_model(file(name), *model, {.strict = false});
    const auto& python = said[name];
    EXPECT_EQ(nlohmann::json(left.missing_keys), python["missing"]) << name;
    // Python lists its keys in the order of its modules.
    auto unexpected = left.unexpected_keys;
    std::ranges::sort(unexpected);
    EXPECT_EQ(nlohmann::json(unexpected), python["unexpected"]) << name;
  }
}

// The advice was to name a file that torch.save wrote, which these are.
TEST_F(PythonInterop, AFileOfSomethingElseSaysWhatItHolds) {
  EXPECT_THAT(message_of([&] { load_snapshot_file(file("function.pt")); }),
              HasSubstr("its \"fun\" is a __builtin__.print; its keys are "
                        "fun; name one of its state_dicts"));
  EXPECT_THAT(message_of([&] { load_snapshot_file(file("module.pt")); }),
              HasSubstr("what it holds is a torch.nn.modules.container."
                        "Sequential, not a dict; name one of its state_dicts "
                        "(load_model() has the option key), or in Python save "
                        "one: torch.save(model.state_dict(), path)"));
}

TEST_F(PythonInterop, EveryOptimizerOfPythonGoesOnHere) {
  for (const std::string name : kOptimizers) {
    const Snapshot read = load_snapshot_file(file("python-" + name + ".pt"));
    auto model = build();
    auto optimizer = make(name, model);
    load_state_dict(*model, read.model_state);
    load_state_dict(*optimizer, *read.optimizer_state);
    train(model, *optimizer, 3, 6);
    const Snapshot end = load_snapshot_file(file("python-" + name + "-end.pt"));
    const auto own = state_dict(*model);
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(own[i].first, end.model_state[i].first);
      EXPECT_TRUE(torch::allclose(own[i].second, end.model_state[i].second,
                                  1e-12, 1e-12))
          << name << " " << own[i].first;
    }
  }
}

TEST_F(PythonInterop, EveryOptimizerOfOursGoesOnInPython) {
  for (const std::string name : kOptimizers) {
    auto model = build();
    auto optimizer = make(name, model);
    train(model, *optimizer, 0, 3);
    Snapshot snapshot;
    snapshot.model_state = state_dict(*model);
    snapshot.optimizer_state = state_dict(*optimizer);
    save_snapshot_file(file("cpp-" + name + ".pt"), snapshot);
    save_snapshot_file(file("cpp-" + name + ".safetensors"), snapshot);
    train(model, *optimizer, 3, 6);
    snapshot.model_state = state_dict(*model);
    save_snapshot_file(file("cpp-" + name + "-end.pt"), snapshot);
  }
  Snapshot full = sample_snapshot();
  torch::manual_seed(5);
  full.generator_states[0] = at::detail::getDefaultCPUGenerator().get_state();
  full.model_state = {{"drawn", torch::rand(3)}};
  const auto projections = std::make_shared<Projections>("vqk");
  optim::Adam adam(projections->parameters());
  for (const auto& item : projections->named_parameters()) {
    item.value().mutable_grad() = torch::full({2, 2}, double(item.key()[0]));
  }
  adam.step();
  const TrainingState named{.model = projections, .optimizer = &adam};
  for (const char* name : {"cpp-named.pt", "cpp-named.pth"}) {
    save_snapshot(file(name), named);
  }
  Layers layers;
  const auto own = state_dict(layers);
  for (size_t i = 0; i < own.size(); ++i) {
    own[i].second.copy_(expected(i, own[i].second));
  }
  save_model(file("cpp-layers.safetensors"), layers);
  save_snapshot_file(file("full.pt"), full);
  python("check");
}

}  // namespace
}  // namespace lockstep::internal
