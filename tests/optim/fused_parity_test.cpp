// The same options, groups and gradients give the same bits as Python's fused
// optimizers, and with complex parameters the numbers of the others.
// fused_peer.py is the Python side and describes the numbers; it runs once.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using Parameters = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

const std::vector<std::vector<int64_t>> kSizes{{37, 5}, {3}, {}, {5000}};

struct Case {
  std::function<OptimizerPtr(const Parameters&)> make;
  // Adds the last group, whose parameters make() leaves out; may be null.
  std::function<void(torch::optim::Optimizer&, const Parameters&)> add{};
};

template <class Optimizer>
Case make(typename Optimizer::Options options) {
  return {[options](const Parameters& parameters) -> OptimizerPtr {
    return std::make_unique<Optimizer>(parameters, options);
  }};
}

// With a group for each parameter.
template <class Optimizer, class Group>
Case grouped(typename Optimizer::Options options, std::vector<Group> groups) {
  const auto with_parameters = [groups](const Parameters& parameters) {
    auto all = groups;
    for (size_t i = 0; i < parameters.size(); ++i) {
      all[i % all.size()].params.push_back(parameters[i]);
    }
    return all;
  };
  return {[=](const Parameters& parameters) -> OptimizerPtr {
            auto first = with_parameters(parameters);
            first.pop_back();
            return std::make_unique<Optimizer>(first, options);
          },
          [=](torch::optim::Optimizer& to, const Parameters& parameters) {
            dynamic_cast<Optimizer&>(to).add_param_group(
                with_parameters(parameters).back());
          }};
}

constexpr std::tuple kClassBetas{0.9, 0.999};

const std::map<std::string, Case> kCases{
    {"sgd", make<optim::SGD>({})},
    {"sgd_decay", make<optim::SGD>({.lr = 0.1, .weight_decay = 0.01})},
    {"sgd_momentum",
     make<optim::SGD>(
         {.lr = 0.1, .momentum = 0.9, .dampening = 0.25, .maximize = true})},
    {"sgd_nesterov",
     make<optim::SGD>(
         {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true})},
    {"adam", make<optim::Adam>({})},
    {"adam_amsgrad", make<optim::Adam>({.lr = 0.02,
                                        .betas = {0.8, 0.95},
                                        .eps = 1e-6,
                                        .weight_decay = 0.1,
                                        .amsgrad = true})},
    {"adamw", make<optim::AdamW>({})},
    {"adamw_maximize",
     make<optim::AdamW>({.lr = 0.02, .amsgrad = true, .maximize = true})},
    {"sgd_groups",
     grouped<optim::SGD, optim::SGDGroup>(
         {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
         {{},
          {.weight_decay = 0},
          {.lr = 1e-3, .momentum = 0, .nesterov = false},
          {.dampening = 0.5, .nesterov = false}})},
    {"adam_groups", grouped<optim::Adam, optim::AdamGroup>(
                        {.lr = 0.02,
                         .betas = {0.8, 0.95},
                         .eps = 1e-6,
                         .weight_decay = 0.1,
                         .amsgrad = true},
                        {{},
                         {.eps = 1e-8, .weight_decay = 0},
                         {.lr = 1e-3, .betas = kClassBetas, .amsgrad = false},
                         {.betas = kClassBetas, .weight_decay = 0}})},
    {"adamw_groups",
     grouped<optim::AdamW, optim::AdamWGroup>(
         {.lr = 0.02, .betas = {0.8, 0.95}, .weight_decay = 0.1},
         {{},
          {.weight_decay = 0},
          {.lr = 1e-3, .betas = kClassBetas, .weight_decay = 0.01},
          {.weight_decay = 0.01, .amsgrad = true}})},
};
const std::map<std::string, at::ScalarType> kDtypes{
    {"float32", at::kFloat},          {"float64", at::kDouble},
    {"float16", at::kHalf},           {"bfloat16", at::kBFloat16},
    {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble}};

at::Tensor fractions(int64_t factor, int64_t shift, int64_t modulus, double by,
                     size_t index, at::ScalarType dtype) {
  const auto size = c10::IntArrayRef(kSizes[index]);
  const auto numbers =
      (torch::arange(c10::multiply_integers(size)) * factor + shift) % modulus -
      modulus / 2;
  at::Tensor fractions = numbers / by;
  if (c10::isComplexType(dtype)) {
    fractions = fractions.to(at::kDouble);
    fractions = torch::complex(fractions, 0.25 - fractions);
  }
  return fractions.to(dtype).view(size);
}

// Compares the options of all groups, and then the defaults, with Python's.
void expect_options(torch::optim::Optimizer& optimizer,
                    const nlohmann::json& theirs) {
  auto groups = state_dict(optimizer).param_groups;
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(Parameters()));
  groups.push_back(state_dict(optimizer).param_groups.back());
  optimizer.param_groups().pop_back();
  ASSERT_EQ(groups.size(), theirs.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& [name, value] : groups[g].options) {
      SCOPED_TRACE(name + " of group " + std::to_string(g));
      if (const auto* flag = std::get_if<bool>(&value)) {
        if (theirs[g].contains(name) && theirs[g][name].is_boolean()) {
          EXPECT_EQ(*flag, theirs[g][name].get<bool>());
        }
      } else if (const auto* number = std::get_if<double>(&value)) {
        EXPECT_EQ(*number, theirs[g].at(name).get<double>());
      } else if (const auto* list = std::get_if<std::vector<double>>(&value)) {
        EXPECT_EQ(*list, theirs[g].at(name).get<std::vector<double>>());
      }
    }
  }
}

// `twice` lists each parameter twice, as module->parameters() does with tied
// weights; Python's lists them once.
at::Tensor train(const Case& one, at::ScalarType dtype, bool twice,
                 const nlohmann::json& groups) {
  Parameters parameters;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    parameters.push_back(fractions(5, static_cast<int64_t>(i), 23, 8, i, dtype)
                             .requires_grad_());
  }
  Parameters named = parameters;
  if (twice) named.insert(named.end(), parameters.begin(), parameters.end());
  const OptimizerPtr optimizer = one.make(named);
  for (int64_t step = 0; step < 20; ++step) {
    if (one.add && step == 7) {
      one.add(*optimizer, named);
      expect_options(*optimizer, groups);
    }
    if (step == 10) {
      auto& options = optimizer->param_groups()[0].options();
      options.set_lr(options.get_lr() / 2);
    }
    for (size_t i = 0; i < kSizes.size(); ++i) {
      const bool skipped = i == 1 && step % 2 == 1;
      parameters[i].mutable_grad() =
          skipped ? at::Tensor()
                  : fractions(7, step * 13 + static_cast<int64_t>(i), 17, 16, i,
                              dtype);
    }
    optimizer->step();
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : parameters) {
    flat.push_back(parameter.detach().flatten());
  }
  at::Tensor all = torch::cat(flat);
  if (all.is_complex()) all = torch::view_as_real(all).flatten();
  return all.to(at::kDouble);
}

TEST(FusedParity, BitsArePythons) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no " << LOCKSTEP_TORCH_PYTHON;
  }
  std::string folder = fs::temp_directory_path() / "lockstep-optim-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const auto result =
      testing::RunningProgram(
          {LOCKSTEP_TORCH_PYTHON,
           LOCKSTEP_SOURCE_DIR "/tests/optim/fused_peer.py", folder},
          {})
          .finish(std::chrono::seconds(100));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  nlohmann::json groups;
  std::ifstream(fs::path(folder) / "groups.json") >> groups;
  for (const auto& [name, one] : kCases) {
    for (const auto& [dtype_name, dtype] : kDtypes) {
      SCOPED_TRACE(name + " " + dtype_name);
      std::ifstream file(fs::path(folder) / (name + "_" + dtype_name + ".bin"),
                         std::ios::binary);
      std::string bytes{std::istreambuf_iterator<char>(file), {}};
      const auto theirs = torch::from_blob(
          bytes.data(), {static_cast<int64_t>(bytes.size() / sizeof(double))},
          at::kDouble);
      for (bool twice : {false, true}) {
        const at::Tensor ours = train(one, dtype, twice, groups[name]);
        ASSERT_EQ(ours.numel(), theirs.numel());
        // With complex parameters, the same operations in another order, whose
        // rounding Adam enlarges where gradients are small.
        const double bound = dtype == at::kComplexFloat    ? 1e-4
                             : dtype == at::kComplexDouble ? 1e-12
                                                           : 0;
        EXPECT_TRUE(bound == 0 ? ours.equal(theirs)
                               : ours.allclose(theirs, bound, bound))
            << "differ by up to " << (ours - theirs).abs().max().item<double>()
            << (twice ? ", where parameters are named twice" : "");
      }
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace lockstep::internal
