// Compares checkpoint() with Python's torch.utils.checkpoint on the same
// weights, seeds and options (checkpointing_peer.py).

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using torch::Tensor;

constexpr int kBlocks = 3;
constexpr int64_t kWidth = 6;

struct Case {
  double dropout;
  bool autocast;

  std::string name() const {
    return std::to_string(dropout) + (autocast ? " 1" : " 0");
  }
};

// The compared tensors, in the order of the file.
struct Outcome {
  std::vector<Tensor> numbers;

  void add(const Tensor& tensor) {
    numbers.push_back(tensor.detach().to(torch::kDouble).flatten().clone());
  }
  Tensor flat() const { return torch::cat(numbers); }
};

struct PeerBlockImpl : torch::nn::Module {
  explicit PeerBlockImpl(double rate_of) : rate(rate_of) {
    inner = register_module("inner", torch::nn::Linear(kWidth, 2 * kWidth));
    outer = register_module("outer", torch::nn::Linear(2 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    return x + outer(torch::dropout(inner(x).tanh(), rate, true));
  }
  double rate;
  int calls = 0;
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(PeerBlock);

// Sine waves, which Python computes as well.
void fill(std::vector<Tensor> tensors) {
  const torch::NoGradGuard no_grad;
  double start = 0.1;
  for (auto& tensor : tensors) {
    const auto count = tensor.numel();
    tensor.copy_(torch::sin(torch::arange(count, torch::kDouble) * 0.7 + start)
                     .mul(0.4)
                     .view(tensor.sizes()));
    start += 0.3;
  }
}

Tensor outcome_here(const Case& test) {
  torch::nn::ModuleList blocks;
  for (int i = 0; i < kBlocks; ++i) blocks->push_back(PeerBlock(test.dropout));
  const auto dtype = test.autocast ? torch::kFloat : torch::kDouble;
  blocks->to(dtype);
  auto input = torch::empty({5, kWidth}, dtype);
  fill({input});
  fill(blocks->parameters());
  Outcome outcome;
  torch::manual_seed(21);
  for (int step = 0; step < 2; ++step) {
    blocks->zero_grad();
    auto x = input.clone().requires_grad_();
    Tensor y = x;
    {
      const Autocast mixed(at::kCPU, at::kBFloat16, test.autocast);
      for (int i = 0; i < kBlocks; ++i) {
        y = checkpoint(blocks->ptr<PeerBlockImpl>(static_cast<size_t>(i)), y);
      }
    }
    auto loss = y.square().sum();
    loss.backward();
    outcome.add(loss);
    outcome.add(x.grad());
    for (const auto& parameter : blocks->parameters()) {
      outcome.add(parameter.grad());
    }
  }
  for (int i = 0; i < kBlocks; ++i) {
    outcome.add(torch::tensor(
        double(blocks->at<PeerBlockImpl>(static_cast<size_t>(i)).calls)));
  }
  outcome.add(torch::rand({3}));  // the generator goes on alike
  return outcome.flat();
}

TEST(CheckpointingParity, GivesThePythonNumbers) {
  if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  torch::set_num_threads(1);
  const testing::TemporaryFolder temporary;
  const std::filesystem::path folder = temporary.path();
  std::vector<Case> cases;
  for (double dropout : {0.0, 0.4}) {
    for (bool autocast : {false, true}) cases.push_back({dropout, autocast});
  }
  const auto output = [&](size_t i) {
    return (folder / std::to_string(i)).string();
  };
  std::ofstream jobs(folder / "jobs.txt");
  for (size_t i = 0; i < cases.size(); ++i) {
    jobs << cases[i].name() << ' ' << output(i) << '\n';
  }
  jobs.close();
  testing::run_python_peer(
      {.arguments = {LOCKSTEP_SOURCE_DIR
                     "/tests/parallel/checkpointing/checkpointing_peer.py",
                     folder / "jobs.txt"},
       .allowed = std::chrono::seconds(80)});
  ASSERT_FALSE(HasFailure());
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].name());
    auto bytes = testing::read_file(output(i));
    const auto want = torch::from_blob(
        bytes.data(), {static_cast<int64_t>(bytes.size() / 8)}, torch::kDouble);
    const auto have = outcome_here(cases[i]);
    ASSERT_EQ(have.sizes(), want.sizes());
    EXPECT_TRUE(torch::equal(have, want))
        << (have - want).abs().max().item<double>();
  }
}

}  // namespace
}  // namespace lockstep::internal
