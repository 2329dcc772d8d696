// Compares SyncBatchNorm over ranks with Python's BatchNorm in one process
// (sync_batch_norm_peer.py).

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using testing::World;

constexpr int kSteps = 4;
constexpr int64_t kRows = 6;
constexpr int64_t kChannels = 3;
constexpr double kFloatBound = 3e-6;
constexpr double kDoubleBound = 1e-13;

struct Case {
  int dimensions;
  std::string dtype;
  std::string momentum;

  std::string name() const {
    return std::to_string(dimensions) + '_' + dtype + '_' + momentum;
  }
  std::vector<int64_t> shape() const {
    std::vector<int64_t> shape{kRows, kChannels};
    for (int i = 0; i < dimensions; ++i) shape.push_back(4 + i);
    return shape;
  }
  at::ScalarType type() const {
    return dtype == "float64" ? at::kDouble : at::kFloat;
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (int dimensions : {1, 2, 3}) {
    for (const char* dtype : {"float32", "float64"}) {
      for (const char* momentum : {"0.1", "None"}) {
        cases.push_back({dimensions, dtype, momentum});
      }
    }
  }
  return cases;
}

struct Numbers {
  at::Tensor weight, bias;
  std::vector<at::Tensor> batches, factors;
};

Numbers numbers(const Case& test) {
  torch::manual_seed(test.dimensions);
  Numbers all{torch::rand({kChannels}, at::kDouble) + 0.5,
              torch::randn({kChannels}, at::kDouble),
              {},
              {}};
  for (int step = 0; step < kSteps; ++step) {
    all.batches.push_back(torch::randn(test.shape(), at::kDouble) * 2 + step);
    all.factors.push_back(torch::randn(test.shape(), at::kDouble));
  }
  return all;
}

// Runs all cases in Python, started by rank 0, unless this world has run them
// already.
fs::path python_results(const World& world) {
  fs::path folder = world.folder / "sync_batch_norm";
  if (world.rank == 0 && fs::create_directory(folder)) {
    std::ofstream jobs(folder / "jobs.txt");
    for (const Case& test : all_cases()) {
      auto all = numbers(test);
      std::vector<at::Tensor> parts{all.weight, all.bias};
      for (int step = 0; step < kSteps; ++step) {
        parts.push_back(all.batches[step].flatten());
        parts.push_back(all.factors[step].flatten());
      }
      auto flat = torch::cat(parts);
      auto file = (folder / test.name()).string();
      std::ofstream(file + ".input", std::ios::binary)
          .write(static_cast<const char*>(flat.data_ptr()),
                 static_cast<std::streamsize>(flat.nbytes()));
      std::string shape;
      for (int64_t size : test.shape()) {
        shape += (shape.empty() ? "" : ",") + std::to_string(size);
      }
      jobs << test.dimensions << ' ' << test.dtype << ' ' << test.momentum
           << ' ' << shape << ' ' << kSteps << ' ' << file << '\n';
    }
    jobs.close();
    testing::run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR
                       "/tests/parallel/sync_batch_norm_peer.py",
                       folder / "jobs.txt"}});
  }
  barrier();
  return folder;
}

// Reads the numbers that Python wrote, in order.
class Wanted {
 public:
  Wanted(const std::string& file, double bound)
      : bytes_(testing::read_file(file)), bound_(bound) {}

  void expect(const at::Tensor& have, const std::string& what, int64_t first,
              const std::vector<int64_t>& shape) {
    auto all = torch::from_blob(
        bytes_.data(), {static_cast<int64_t>(bytes_.size() / 8)}, at::kDouble);
    auto want = all.narrow(0, at_, c10::multiply_integers(shape)).view(shape);
    at_ += want.numel();
    want = want.narrow(0, first, have.size(0));
    if (have.numel() == 0) return;
    auto error = (have.detach().to(at::kDouble) - want).abs().max();
    EXPECT_LE(error.item<double>(),
              bound_ * (1 + want.abs().max().item<double>()))
        << what;
  }
  bool at_end() const { return at_ * 8 == static_cast<int64_t>(bytes_.size()); }

 private:
  std::string bytes_;
  double bound_;
  int64_t at_ = 0;
};

template <typename Norm>
void expect_parity(const World& world, const Case& test,
                   const fs::path& python) {
  SCOPED_TRACE(test.name());
  auto all = numbers(test);
  nn::SyncBatchNormOptions options(kChannels);
  if (test.momentum == "None") options.momentum(std::nullopt);
  Norm norm(options);
  norm->to(test.type());
  {
    torch::NoGradGuard no_grad;
    norm->weight.copy_(all.weight);
    norm->bias.copy_(all.bias);
  }
  // The first rank has one row, the last one the rest, and the others none.
  int64_t first = world.rank == 0 ? 0 : 1;
  int64_t rows = world.rank == 0                ? 1
                 : world.rank == world.size - 1 ? kRows - 1
                                                : 0;
  auto part_of = [&](const at::Tensor& whole) {
    return whole.narrow(0, first, rows).to(test.type());
  };
  Wanted wanted((python / test.name()).string() + ".output",
                test.dtype == "float64" ? kDoubleBound : kFloatBound);
  auto summed = [](const at::Tensor& gradient) {
    auto sum = gradient.clone();
    all_reduce(sum);
    return sum;
  };
  for (int step = 0; step < kSteps; ++step) {
    auto batch = part_of(all.batches[step]).requires_grad_();
    norm->zero_grad();
    auto out = norm(batch);
    (out.sin() * part_of(all.factors[step])).sum().backward();
    wanted.expect(out, "output", first, test.shape());
    wanted.expect(batch.grad(), "gradient of the batch", first, test.shape());
    wanted.expect(summed(norm->weight.grad()), "gradient of the weight", 0,
                  {kChannels});
    wanted.expect(summed(norm->bias.grad()), "gradient of the bias", 0,
                  {kChannels});
  }
  norm->eval();
  wanted.expect(norm->running_mean, "running mean", 0, {kChannels});
  wanted.expect(norm->running_var, "running variance", 0, {kChannels});
  wanted.expect(norm(part_of(all.batches.back())), "output in eval mode", first,
                test.shape());
  EXPECT_TRUE(wanted.at_end());
}

WORLD_TEST(SyncBatchNormParity, PythonsBatchNormOnTheWholeBatch, 2, 3) {
  auto group = init_process_group();
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  auto python = python_results(world);
  for (const Case& test : all_cases()) {
    if (test.dimensions == 1) {
      expect_parity<nn::SyncBatchNorm1d>(world, test, python);
    } else if (test.dimensions == 2) {
      expect_parity<nn::SyncBatchNorm2d>(world, test, python);
    } else {
      expect_parity<nn::SyncBatchNorm3d>(world, test, python);
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
