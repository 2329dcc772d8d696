// The same losses, overflows and bounds in Python's torch.amp and
// torch.nn.utils and in ours lead to the same scales, the same skipped steps
// and the same parameters. Python is parity_peer.py, which says what a job is;
// it runs once.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// Both sides use the same kernels; only the order in which a step combines its
// operations may differ.
constexpr double kBound = 1e-6;

Json scaler_jobs() {
  Json clean = Json::object();
  Json infinity = {{"inject", {{1, 0, "inf"}}}};
  Json nan = {{"inject", {{0, 1, "nan"}}}};
  Json both = {{"inject", {{0, 0, "-inf"}, {1, 1, "nan"}}}};
  Json clipped = {{"unscale", {0}}, {"clip", 0.05}};
  Json unscaled = {{"unscale", {1, 0}}, {"inject", {{0, 0, "inf"}}}};
  Json first_only = {{"only", {0}}};
  Json unscaled_only = {
      {"unscale", {1}}, {"inject", {{1, 0, "inf"}}}, {"only", {0}}};
  Json set = {{"update", 24.0}};
  return Json::array({
      {{"options", {{"init_scale", 65536.0}, {"growth_interval", 3}}},
       {"lr", 0.1},
       {"steps",
        {clean, clean, clean, clean, infinity, clean, clean, nan, both, clean,
         clean, clean, clean, clean, clean, clean}}},
      {{"options",
        {{"init_scale", 100.0},
         {"growth_factor", 1.7},
         {"backoff_factor", 0.3},
         {"growth_interval", 2}}},
       {"lr", 0.05},
       {"steps",
        {clipped, unscaled, first_only, unscaled_only, set, clean, clean, set,
         infinity, clipped, clean, clean}}},
      // The scaled loss overflows by itself, and the scale stays finite when
      // it would grow past float32.
      {{"options", {{"init_scale", 3e38}, {"growth_interval", 1}}},
       {"lr", 0.01},
       {"factor", 8.0},
       {"steps", Json::array({clean, clean, clean, clean, clean, clean})}},
      {{"options", {{"init_scale", 2.0}}},
       {"lr", 0.1},
       {"state", to_json({.scale = 0.1,
                          .growth_factor = 3,
                          .backoff_factor = 0.25,
                          .growth_interval = 4,
                          .growth_tracker = 2})},
       {"steps", {clean, clean, clean, nan, clean}}},
  });
}

Json clip_jobs() {
  Json jobs = Json::array();
  for (const char* norm_type : {"1", "2", "2.5", "0", "-1", "inf", "-inf"}) {
    for (double bound : {0.01, 1.0, 1000.0}) {
      jobs.push_back({norm_type, bound});
    }
  }
  return jobs;
}

Json autocast_jobs() {
  Json jobs = Json::array();
  for (const char* dtype : {"bfloat16", "float16"}) {
    jobs.push_back({{"lr", 0.1}, {"steps", 20}, {"dtype", dtype}});
  }
  return jobs;
}

// Returns Python's results for all jobs; null if LibTorch has no Python beside
// it.
const Json& python() {
  static const Json answers = [] {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) return Json();
    Json jobs = {{"scaler", scaler_jobs()},
                 {"clip", clip_jobs()},
                 {"autocast", autocast_jobs()}};
    return Json::parse(testing::run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/amp/parity_peer.py"},
         .input = jobs.dump()}));
  }();
  return answers;
}

struct Layers {
  Layers() {
    torch::NoGradGuard no_grad;
    for (auto& layer : linear) {
      for (auto& parameter : layer->parameters()) {
        parameter.copy_(
            torch::linspace(-0.5, 0.75, parameter.numel()).view_as(parameter));
      }
    }
  }

  torch::Tensor loss(double factor) {
    auto x = torch::linspace(-1, 1, 20).view({5, 4});
    auto y = torch::linspace(0, 1, 10).view({5, 2});
    auto hidden = torch::tanh(linear[0](x * factor));
    return torch::mse_loss(linear[1](hidden).to(torch::kFloat), y);
  }

  std::vector<torch::Tensor> parameters() {
    auto all = linear[0]->parameters();
    for (const auto& parameter : linear[1]->parameters()) {
      all.push_back(parameter);
    }
    return all;
  }

  std::array<torch::nn::Linear, 2> linear{torch::nn::Linear(4, 3),
                                          torch::nn::Linear(3, 2)};
};

void expect_numbers(const std::vector<torch::Tensor>& ours, const Json& python,
                    double bound) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : ours) flat.push_back(tensor.detach().flatten());
  auto numbers = torch::cat(flat).to(torch::kDouble);
  auto expected =
      torch::tensor(python.get<std::vector<double>>(), torch::kDouble);
  ASSERT_EQ(numbers.sizes(), expected.sizes());
  EXPECT_LE((numbers - expected).abs().max().item<double>(), bound);
}

void expect_scaler(const Json& job, const Json& python) {
  auto option = [&](const char* name, double otherwise) {
    return job["options"].value(name, otherwise);
  };
  GradScaler scaler(
      {.device = at::kCPU,
       .init_scale = option("init_scale", 65536),
       .growth_factor = option("growth_factor", 2),
       .backoff_factor = option("backoff_factor", 0.5),
       .growth_interval = job["options"].value("growth_interval", 2000)});
  if (job.contains("state")) {
    scaler.load_state_dict(
        grad_scaler_state_from_json(job["state"].get<std::string>()));
  }
  Layers layers;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (auto& layer : layers.linear) {
    optimizers.push_back(std::make_unique<torch::optim::SGD>(
        layer->parameters(), torch::optim::SGDOptions(job["lr"])));
  }
  Json norms = Json::array();
  for (size_t i = 0; i < job["steps"].size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    const Json& step = job["steps"][i];
    for (auto& optimizer : optimizers) optimizer->zero_grad();
    auto loss =
        layers.loss(1 + static_cast<double>(i) / 10) * job.value("factor", 1.0);
    scaler.scale(loss).backward();
    for (const Json& place : step.value("inject", Json::array())) {
      auto gradient =
          layers.linear[place[0]]->parameters()[place[1]].mutable_grad();
      gradient.view({-1})[0] = std::stod(place[2].get<std::string>());
    }
    for (size_t layer : step.value("unscale", std::vector<size_t>())) {
      scaler.unscale_(*optimizers[layer]);
    }
    if (step.contains("clip")) {
      norms.push_back(
          clip_grad_norm_(layers.linear[0]->parameters(), step["clip"])
              .item<double>());
    }
    std::vector<size_t> stepped;
    for (size_t layer : step.value("only", std::vector<size_t>{0, 1})) {
      scaler.step(*optimizers[layer]);
      if (!scaler.found_inf(*optimizers[layer])) stepped.push_back(layer);
    }
    if (step.contains("update")) {
      scaler.update(step["update"].get<double>());
    } else {
      scaler.update();
    }
    EXPECT_EQ(stepped, python["stepped"][i].get<std::vector<size_t>>());
    EXPECT_EQ(scaler.get_scale(), python["scale"][i].get<double>());
    EXPECT_EQ(scaler.state_dict()->growth_tracker,
              python["tracker"][i].get<int64_t>());
  }
  ASSERT_EQ(norms.size(), python["norms"].size());
  for (size_t i = 0; i < norms.size(); ++i) {
    EXPECT_NEAR(norms[i].get<double>(), python["norms"][i].get<double>(),
                kBound);
  }
  expect_numbers(layers.parameters(), python["parameters"], kBound);
  EXPECT_EQ(grad_scaler_state_from_json(python["state"].get<std::string>()),
            scaler.state_dict());
}

TEST(AmpParity, GradScaler) {
  if (python().is_null()) GTEST_SKIP() << "no Python";
  auto jobs = scaler_jobs();
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE("run " + std::to_string(i));
    expect_scaler(jobs[i], python()["scaler"][i]);
  }
}

// The runs above prove nothing unless they skip steps and grow the scale.
TEST(AmpParity, RunsSkipSomeStepsAndGrow) {
  if (python().is_null()) GTEST_SKIP() << "no Python";
  for (const Json& run : python()["scaler"]) {
    size_t steps = 0;
    for (const Json& stepped : run["stepped"]) steps += stepped.size();
    EXPECT_GT(steps, 0U);
    EXPECT_LT(steps, 2 * run["stepped"].size());
  }
  auto scales = python()["scaler"][0]["scale"].get<std::vector<double>>();
  EXPECT_EQ(*std::ranges::max_element(scales), 131072);
  EXPECT_LT(*std::ranges::min_element(scales), 65536);
}

TEST(AmpParity, ClipGradNorm) {
  if (python().is_null()) GTEST_SKIP() << "no Python";
  auto jobs = clip_jobs();
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(jobs[i].dump());
    std::vector<torch::Tensor> parameters = {
        torch::zeros({7, 5}), torch::zeros({11}), torch::zeros({1})};
    std::vector<torch::Tensor> gradients;
    for (size_t k = 0; k < parameters.size(); ++k) {
      auto& parameter = parameters[k];
      parameter.mutable_grad() =
          torch::linspace(-1.0 - static_cast<double>(k), 2, parameter.numel())
              .view_as(parameter);
      gradients.push_back(parameter.grad());
    }
    auto norm = clip_grad_norm_(parameters, jobs[i][1],
                                std::stod(jobs[i][0].get<std::string>()));
    EXPECT_EQ(norm.item<double>(), python()["clip"][i][0].get<double>());
    expect_numbers(gradients, python()["clip"][i][1], 0);
  }
}

TEST(AmpParity, TrainingUnderAutocast) {
  if (python().is_null()) GTEST_SKIP() << "no Python";
  auto jobs = autocast_jobs();
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(jobs[i].dump());
    auto dtype = jobs[i]["dtype"] == "float16" ? at::kHalf : at::kBFloat16;
    Layers layers;
    torch::optim::SGD optimizer(layers.parameters(),
                                torch::optim::SGDOptions(jobs[i]["lr"]));
    std::vector<torch::Tensor> losses;
    for (int step = 0; step < jobs[i]["steps"].get<int>(); ++step) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        Autocast mixed(at::kCPU, dtype);
        loss = layers.loss(1 + step / 10.0);
      }
      loss.backward();
      optimizer.step();
      losses.push_back(loss);
    }
    expect_numbers(losses, python()["autocast"][i]["losses"], kBound);
    expect_numbers(layers.parameters(), python()["autocast"][i]["parameters"],
                   kBound);
  }
}

}  // namespace
}  // namespace lockstep::internal
