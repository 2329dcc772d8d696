// Every scheduler sets the learning rates and momenta of Python's, bit for bit,
// has the same state, and goes on from a snapshot that the other language has
// saved. Averaged models are Python's, too. scheduler_peer.py is the Python
// side; it runs once.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "lockstep/parallel/swa/update_bn.h"
#include "tests/harness/python_peer.h"
#include "tests/optim/scheduler_cases.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using namespace testing;  // NOLINT
using nlohmann::json;

// Returns the tree as scheduler_peer.py writes it.
json as_json(const StateTree& tree) {
  if (const auto* flag = tree.as<bool>()) return *flag;
  if (const auto* integer = tree.as<int64_t>()) return *integer;
  if (const auto* text = tree.as<std::string>()) return *text;
  if (const auto* number = tree.as<double>()) {
    if (std::isinf(*number)) return *number > 0 ? "inf" : "-inf";
    return *number;
  }
  if (const auto* list = tree.as<StateTree::List>()) {
    json array = json::array();
    for (const StateTree& item : *list) array.push_back(as_json(item));
    return array;
  }
  json object = json::object();
  if (const auto* dict = tree.as<StateTree::Dict>()) {
    for (const auto& [name, item] : dict->items) object[name] = as_json(item);
  } else if (const auto* counter = tree.as<StateTree::Counter>()) {
    for (const auto& [key, count] : *counter) {
      object[std::to_string(key)] = count;
    }
  } else {
    return nullptr;
  }
  return object;
}

// Removes what Python's composite schedulers have only if they are the first
// part of another SequentialLR, and never use.
void remove_unused(json& state) {
  if (!state.contains("_schedulers")) return;
  state.erase("_step_count");
  state.erase("_is_initial");
  for (json& part : state["_schedulers"]) remove_unused(part);
}

json now(const Trained& trained, const Scheduled& scheduled) {
  return {{"lr", trained.rates()},
          {"momentum", trained.momenta()},
          {"last_lr", scheduled.last_lr()}};
}

class SchedulerParity : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) return;
    std::string made = fs::temp_directory_path() / "lockstep-optim-XXXXXX";
    ASSERT_NE(mkdtemp(made.data()), nullptr);
    folder() = made;
    for (const SchedulerCase& one : scheduler_cases()) run(one);
    run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/optim/scheduler_peer.py",
                       made},
         .allowed = std::chrono::seconds(60)});
    ASSERT_FALSE(HasFailure());
    for (const char* name : {"rates", "states", "continued"}) {
      python()[name] =
          json::parse(std::ifstream(folder() / (name + std::string(".json"))));
    }
  }
  static void TearDownTestSuite() { fs::remove_all(folder()); }

  void SetUp() override {
    if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no " << LOCKSTEP_TORCH_PYTHON;
    }
    ASSERT_EQ(python().size(), 3);
  }

  // Steps the schedulers of a case and saves them in the middle.
  static void run(const SchedulerCase& one) {
    const Trained trained(one.adam);
    const Scheduled scheduled = one.make(*trained.optimizer);
    json& trace = ours()["rates"][one.name];
    trace.push_back(now(trained, scheduled));
    for (int step = 0; step < kSteps; ++step) {
      if (step == one.adds_group_at) trained.add_group();
      scheduled.step(step);
      trace.push_back(now(trained, scheduled));
      if (step + 1 != kMiddle) continue;
      json state = as_json(scheduled.scheduler->state_dict());
      state.erase("param_groups");
      ours()["states"][one.name] = std::move(state);
      save_snapshot(folder() / ("cpp-" + one.name + ".pt"),
                    {.model = trained.model.ptr(),
                     .optimizer = trained.optimizer.get(),
                     .scheduler = scheduled.scheduler.get()});
    }
  }

  static fs::path& folder() {
    static fs::path path;
    return path;
  }
  static json& ours() {
    static json values;
    return values;
  }
  static json& python() {
    static json values;
    return values;
  }
};

TEST_F(SchedulerParity, RatesAndMomentaArePythons) {
  const json& theirs = python()["rates"];
  EXPECT_EQ(theirs.size(), scheduler_cases().size());
  for (const SchedulerCase& one : scheduler_cases()) {
    const json& expected = theirs.at(one.name);
    const json& got = ours()["rates"][one.name];
    ASSERT_EQ(expected.size(), kSteps + 1);
    for (size_t step = 0; step < expected.size(); ++step) {
      ASSERT_EQ(got[step], expected[step]) << one.name << ", step " << step;
    }
  }
}

TEST_F(SchedulerParity, StatesArePythons) {
  for (const SchedulerCase& one : scheduler_cases()) {
    json expected = python()["states"].at(one.name);
    remove_unused(expected);
    // Python's base_lrs never gets the added group, and its formulas that use
    // base_lrs fail then.
    if (one.adds_group_at >= 0 && expected.contains("base_lrs")) {
      expected["base_lrs"].push_back(0.4);
    }
    EXPECT_EQ(ours()["states"][one.name], expected) << one.name;
  }
}

TEST_F(SchedulerParity, PythonGoesOnFromASnapshotOfOurs) {
  for (const SchedulerCase& one : scheduler_cases()) {
    const json& theirs = python()["continued"].at(one.name);
    const json& expected = ours()["rates"][one.name];
    ASSERT_EQ(theirs.size(), kSteps - kMiddle + 1);
    for (size_t step = 0; step < theirs.size(); ++step) {
      ASSERT_EQ(theirs[step], expected[step + kMiddle])
          << one.name << ", step " << step + kMiddle;
    }
  }
}

TEST_F(SchedulerParity, ASnapshotOfPythonGoesOnHere) {
  for (const SchedulerCase& one : scheduler_cases()) {
    Trained trained(one.adam);
    const Scheduled scheduled = one.make(*trained.optimizer);
    if (one.adds_group_at >= 0) trained.add_group();
    TrainingState state{.model = trained.model.ptr(),
                        .optimizer = trained.optimizer.get(),
                        .scheduler = scheduled.scheduler.get()};
    ASSERT_TRUE(
        load_snapshot(folder() / ("python-" + one.name + ".pt"), state));
    const json& expected = python()["rates"].at(one.name);
    EXPECT_EQ(now(trained, scheduled), expected[kMiddle]) << one.name;
    for (int step = kMiddle; step < kSteps; ++step) {
      scheduled.step(step);
      ASSERT_EQ(now(trained, scheduled),
                expected[static_cast<size_t>(step) + 1])
          << one.name << ", step " << step + 1;
    }
  }
}

torch::nn::Sequential net() {
  torch::nn::Sequential model(torch::nn::Linear(3, 4),
                              torch::nn::BatchNorm1d(4),
                              torch::nn::Linear(4, 2));
  model->to(at::kDouble);
  // Python's double() leaves the count an integer.
  auto& count = model[1]->as<torch::nn::BatchNorm1d>()->num_batches_tracked;
  count.set_data(count.to(at::kLong));
  return model;
}

torch::nn::Sequential fill(torch::nn::Sequential model, int step) {
  const torch::NoGradGuard no_grad;
  const auto state = state_dict(*model);
  for (size_t i = 0; i < state.size(); ++i) {
    const at::Tensor& tensor = state[i].second;
    auto values = torch::arange(tensor.numel(), at::kDouble);
    values = torch::sin(values * 3 + static_cast<double>(5 * i) + step) + 1.5;
    tensor.copy_((i == 6 ? values * 10 : values).view(tensor.sizes()));
  }
  return model;
}

std::vector<std::tuple<at::Tensor, int>> batches() {
  std::vector<std::tuple<at::Tensor, int>> all;
  for (int k = 0; k < 4; ++k) {
    all.emplace_back(
        torch::sin(torch::arange(15, at::kDouble) * (k + 1) + k).view({5, 3}),
        0);
  }
  return all;
}

TEST_F(SchedulerParity, AveragesAndTheirStatisticsArePythons) {
  const auto read = load_tensors(folder() / "swa.pt");
  const std::map<std::string, at::Tensor> theirs(read.begin(), read.end());
  size_t compared = 0;
  const auto expect_same = [&](const std::string& name,
                               const NamedTensors& state, bool bits) {
    for (const auto& [key, value] : state) {
      const at::Tensor& expected = theirs.at(name + "/" + key);
      EXPECT_EQ(value.scalar_type(), expected.scalar_type()) << name << key;
      EXPECT_TRUE(bits ? value.equal(expected)
                       : value.allclose(expected, 1e-12, 1e-12))
          << name << " " << key << "\n"
          << value << "\n"
          << expected;
      ++compared;
    }
  };
  const std::map<std::string, AveragedModelOptions> cases{
      {"equal", {}},
      {"equal_buffers", {.use_buffers = true}},
      {"ema", {.avg_fn = get_ema_avg_fn(0.9)}},
      {"ema_buffers", {.avg_fn = get_ema_avg_fn(), .use_buffers = true}}};
  for (const auto& [name, options] : cases) {
    const auto model = net();
    fill(model, 0);
    AveragedModel<torch::nn::Sequential> average(model, options);
    for (int step = 1; step < 7; ++step) {
      average.update_parameters(fill(model, step));
    }
    expect_same(name, state_dict(average), true);
    average.eval();
    update_bn(batches(), average);
    EXPECT_FALSE(average.module()->is_training());
    expect_same(name + "_bn", state_dict(average), false);
    const at::Tensor out = average(std::get<0>(batches()[0])).detach();
    expect_same(name + "_out", {{"out", out}}, false);
  }
  EXPECT_EQ(compared, theirs.size());
}

}  // namespace
}  // namespace lockstep::internal
