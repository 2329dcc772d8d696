// Parity with Python's DistributedDataParallel: from the same initial
// parameters, data and sampler seed, 20 steps on two ranks lead to the same
// losses and parameters. The Python side is parity_peer.py under torchrun, run
// once for all cases.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/harness/running_program.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using testing::World;

constexpr int64_t kInputs = 20;
constexpr int64_t kHidden = 64;
constexpr int64_t kSamples = 256;
// 16 batches a rank and epoch: 20 steps go on into a second one.
constexpr int64_t kBatchSize = 8;
constexpr int64_t kSteps = 20;
constexpr int64_t kSamplerSeed = 3;

// What the two sides may differ by: rounding in the order of the same
// operations (Python's Adam interpolates its moments, LibTorch's multiplies
// and adds), over 20 steps.
constexpr double kFloatBound = 1e-6;
constexpr double kDoubleBound = 1e-12;

struct Case {
  std::string optimizer;
  std::string dtype;
  int64_t accumulate;

  std::string name() const {
    return optimizer + "_" + dtype + "_" + std::to_string(accumulate);
  }
  double lr() const { return optimizer.starts_with("sgd") ? 0.05 : 1e-2; }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* optimizer : {"sgd", "sgd_momentum", "adam", "adamw"}) {
    for (const char* dtype : {"float32", "float64"}) {
      for (int64_t accumulate : {1, 2}) {
        cases.push_back({optimizer, dtype, accumulate});
      }
    }
  }
  return cases;
}

torch::ScalarType dtype_of(const std::string& name) {
  return name == "float64" ? torch::kDouble : torch::kFloat;
}

// Python's defaults, which need not be LibTorch's, in full.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Case& test, const std::vector<torch::Tensor>& parameters) {
  using namespace torch::optim;
  if (test.optimizer == "adam") {
    return std::make_unique<Adam>(
        parameters,
        AdamOptions(test.lr()).betas({0.9, 0.999}).eps(1e-8).weight_decay(0));
  }
  if (test.optimizer == "adamw") {
    return std::make_unique<AdamW>(parameters, AdamWOptions(test.lr())
                                                   .betas({0.9, 0.999})
                                                   .eps(1e-8)
                                                   .weight_decay(1e-2));
  }
  double momentum = test.optimizer == "sgd_momentum" ? 0.9 : 0;
  return std::make_unique<SGD>(
      parameters,
      SGDOptions(test.lr()).momentum(momentum).dampening(0).weight_decay(0));
}

void write_flat(const fs::path& path, const std::vector<torch::Tensor>& parts) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& part : parts) {
    auto flat = part.detach().contiguous();
    file.write(static_cast<const char*>(flat.data_ptr()),
               static_cast<std::streamsize>(flat.nbytes()));
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

torch::Tensor read_flat(const fs::path& path, torch::ScalarType dtype) {
  std::string bytes = testing::read_file(path);
  auto numbers = static_cast<int64_t>(bytes.size() / c10::elementSize(dtype));
  return torch::from_blob(bytes.data(), {numbers}, dtype).clone();
}

torch::nn::Sequential make_net(torch::ScalarType dtype) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(kInputs, kHidden),
                            torch::nn::Tanh(), torch::nn::Linear(kHidden, 1));
  net->to(dtype);
  return net;
}

TensorDataset make_dataset(torch::ScalarType dtype) {
  torch::manual_seed(2);
  auto data = torch::randn({kSamples, kInputs}, torch::kDouble);
  auto target = torch::sin(data.sum(1, /*keepdim=*/true));
  return {data.to(dtype), target.to(dtype)};
}

// Runs all cases in Python, by rank 0, unless this world has them already.
// Nothing where LibTorch has no Python beside it.
std::optional<fs::path> python_results(const World& world) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) return std::nullopt;
  fs::path folder = world.folder / "python";
  if (world.rank == 0 && fs::create_directory(folder)) {
    std::ofstream jobs(folder / "jobs.txt");
    for (const Case& test : all_cases()) {
      auto file = folder / test.name();
      auto dtype = dtype_of(test.dtype);
      auto dataset = make_dataset(dtype);
      write_flat(file.string() + ".initial", make_net(dtype)->parameters());
      write_flat(file.string() + ".data", {dataset.data(), dataset.target()});
      jobs << "--sizes " << kInputs << ',' << kHidden << ",1 --samples "
           << kSamples << " --batch-size " << kBatchSize << " --steps "
           << kSteps << " --sampler-seed " << kSamplerSeed << " --optimizer "
           << test.optimizer << " --lr " << test.lr() << " --dtype "
           << test.dtype << " --accumulate " << test.accumulate;
      for (const char* part : {"initial", "data", "output", "losses"}) {
        jobs << " --" << part << ' ' << file.string() << '.' << part;
      }
      jobs << '\n';
    }
    jobs.close();
    // `timeout`, so that nothing stays even if this rank is killed.
    testing::RunningProgram python(
        {"/usr/bin/timeout", "--kill-after=5", "50", LOCKSTEP_TORCH_PYTHON,
         "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         LOCKSTEP_SOURCE_DIR "/tests/parallel/parity_peer.py", "--jobs",
         folder / "jobs.txt"},
        {.environment = {std::string("PATH=") + std::getenv("PATH"),
                         "TMPDIR=" + folder.string(), "OMP_NUM_THREADS=1"}});
    auto result = python.finish(std::chrono::seconds(56));
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  barrier();
  return folder;
}

double worst_difference(const torch::Tensor& ours,
                        const torch::Tensor& python) {
  if (ours.sizes() != python.sizes()) {
    throw std::runtime_error("Python wrote " + std::to_string(python.numel()) +
                             " numbers, not " + std::to_string(ours.numel()));
  }
  return (ours - python).abs().max().item<double>();
}

void expect_parity(const World& world, const fs::path& python,
                   const Case& test) {
  auto dtype = dtype_of(test.dtype);
  auto dataset = make_dataset(dtype);
  auto net = make_net(dtype);
  DistributedDataParallel<torch::nn::Sequential> model(net);
  auto optimizer = make_optimizer(test, net->parameters());
  DistributedSampler sampler(kSamples, {.seed = kSamplerSeed});
  DataLoader loader(dataset, sampler, {.batch_size = kBatchSize});

  auto losses = torch::zeros({kSteps}, dtype);
  int64_t batches = 0;
  for (int64_t epoch = 0; batches < kSteps * test.accumulate; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      int64_t step = batches / test.accumulate;
      int64_t micro = batches % test.accumulate;
      auto backward = [&] {
        auto loss = torch::mse_loss(model(batch.data), batch.target) /
                    static_cast<double>(test.accumulate);
        loss.backward();
        losses[step] += loss.detach();
      };
      if (micro == 0) optimizer->zero_grad();
      if (micro < test.accumulate - 1) {
        auto on_this_rank_only = model.no_sync();
        backward();
      } else {
        backward();
        optimizer->step();
      }
      if (++batches == kSteps * test.accumulate) break;
    }
  }
  all_reduce(losses);
  losses /= world.size;

  std::vector<torch::Tensor> flat;
  for (const auto& parameter : net->parameters()) {
    flat.push_back(parameter.detach().flatten());
  }
  auto file = (python / test.name()).string();
  double bound = test.dtype == "float64" ? kDoubleBound : kFloatBound;
  double parameters =
      worst_difference(torch::cat(flat), read_flat(file + ".output", dtype));
  double curve = worst_difference(losses, read_flat(file + ".losses", dtype));
  EXPECT_LE(parameters, bound) << test.name();
  EXPECT_LE(curve, bound) << test.name();
}

void expect_parity(const World& world, const std::string& optimizer,
                   int64_t accumulate) {
  auto group = init_process_group("gloo");
  auto python = python_results(world);
  if (!python) GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  for (const char* dtype : {"float32", "float64"}) {
    expect_parity(world, *python, {optimizer, dtype, accumulate});
  }
}

WORLD_TEST(DdpParity, Sgd, 2) { expect_parity(world, "sgd", 1); }
WORLD_TEST(DdpParity, SgdWithMomentum, 2) {
  expect_parity(world, "sgd_momentum", 1);
}
WORLD_TEST(DdpParity, Adam, 2) { expect_parity(world, "adam", 1); }
WORLD_TEST(DdpParity, AdamW, 2) { expect_parity(world, "adamw", 1); }
WORLD_TEST(DdpParity, AccumulationUnderNoSync, 2) {
  for (const char* optimizer : {"sgd", "sgd_momentum", "adam", "adamw"}) {
    expect_parity(world, optimizer, 2);
  }
}

}  // namespace
}  // namespace lockstep
