// The same options and gradients give the same bits as Python's fused
// optimizers. fused_peer.py is the Python side and describes the numbers; it
// runs once.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using Parameters = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

const std::vector<std::vector<int64_t>> kSizes{{37, 5}, {3}, {}, {5000}};

template <class Optimizer>
auto make(typename Optimizer::Options options) {
  return [options](const Parameters& parameters) -> OptimizerPtr {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

const std::map<std::string, std::function<OptimizerPtr(const Parameters&)>>
    kCases{
        {"sgd", make<optim::SGD>({})},
        {"sgd_decay", make<optim::SGD>({.lr = 0.1, .weight_decay = 0.01})},
        {"sgd_momentum", make<optim::SGD>({.lr = 0.1,
                                           .momentum = 0.9,
                                           .dampening = 0.25,
                                           .maximize = true})},
        {"sgd_nesterov", make<optim::SGD>({.lr = 0.1,
                                           .momentum = 0.9,
                                           .weight_decay = 0.01,
                                           .nesterov = true})},
        {"adam", make<optim::Adam>({})},
        {"adam_amsgrad", make<optim::Adam>({.lr = 0.02,
                                            .betas = {0.8, 0.95},
                                            .eps = 1e-6,
                                            .weight_decay = 0.1,
                                            .amsgrad = true})},
        {"adamw", make<optim::AdamW>({})},
        {"adamw_maximize",
         make<optim::AdamW>({.lr = 0.02, .amsgrad = true, .maximize = true})},
    };
const std::map<std::string, at::ScalarType> kDtypes{
    {"float32", at::kFloat},
    {"float64", at::kDouble},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16}};

at::Tensor fractions(int64_t factor, int64_t shift, int64_t modulus, double by,
                     size_t index, at::ScalarType dtype) {
  const auto size = c10::IntArrayRef(kSizes[index]);
  const auto numbers =
      (torch::arange(c10::multiply_integers(size)) * factor + shift) % modulus -
      modulus / 2;
  return (numbers / by).to(dtype).view(size);
}

// `twice` lists each parameter twice, as module->parameters() does with tied
// weights; Python's lists them once.
at::Tensor train(const std::function<OptimizerPtr(const Parameters&)>& make_it,
                 at::ScalarType dtype, bool twice) {
  Parameters parameters;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    parameters.push_back(fractions(5, static_cast<int64_t>(i), 23, 8, i, dtype)
                             .requires_grad_());
  }
  Parameters named = parameters;
  if (twice) named.insert(named.end(), parameters.begin(), parameters.end());
  const OptimizerPtr optimizer = make_it(named);
  for (int64_t step = 0; step < 20; ++step) {
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
  return torch::cat(flat).to(at::kDouble);
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
          .finish(std::chrono::seconds(60));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const auto& [name, make_it] : kCases) {
    for (const auto& [dtype_name, dtype] : kDtypes) {
      SCOPED_TRACE(name + " " + dtype_name);
      std::ifstream file(fs::path(folder) / (name + "_" + dtype_name + ".bin"),
                         std::ios::binary);
      std::string bytes{std::istreambuf_iterator<char>(file), {}};
      const auto theirs = torch::from_blob(
          bytes.data(), {static_cast<int64_t>(bytes.size() / sizeof(double))},
          at::kDouble);
      for (bool twice : {false, true}) {
        const at::Tensor ours = train(make_it, dtype, twice);
        ASSERT_EQ(ours.numel(), theirs.numel());
        EXPECT_TRUE(ours.equal(theirs))
            << "differ by up to " << (ours - theirs).abs().max().item<double>()
            << (twice ? ", where parameters are named twice" : "");
      }
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace lockstep::internal
