// Compares tensor parallelism with Python's parallelize_module() on the same
// weights (tensor_parallel_peer.py, which runs under torchrun with two ranks).

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using testing::whole_of;
using testing::World;

// As in the peer.
constexpr int kSteps = 3;
constexpr double kLearningRate = 0.1;
constexpr int64_t kBatch = 2;
constexpr int64_t kLength = 6;
constexpr int64_t kFeatures = 8;
constexpr int64_t kHidden = 12;
constexpr int64_t kHeads = 4;
constexpr int64_t kClasses = 13;
constexpr double kBound = 1e-12;

struct Mlp : torch::nn::Module {
  Mlp()
      : up(register_module("up", nn::ColumnParallelLinear(kFeatures, kHidden))),
        down(register_module("down",
                             nn::RowParallelLinear(kHidden, kFeatures))) {}
  at::Tensor loss(const at::Tensor& data) {
    auto x = data.view({kBatch, kLength, kFeatures});
    return down(at::gelu(up(x))).square().mean();
  }
  nn::ColumnParallelLinear up;
  nn::RowParallelLinear down;
};

struct SequenceTransformer : torch::nn::Module {
  SequenceTransformer()
      : embedding(register_module(
            "embedding",
            nn::VocabParallelEmbedding(
                kClasses, kFeatures,
                nn::VocabParallelEmbeddingOptions{.sequence_parallel = true}))),
        norm1(
            register_module("norm1", nn::SequenceParallelLayerNorm(kFeatures))),
        attention(register_module(
            "attention", nn::ParallelSelfAttention(
                             kFeatures, kHeads,
                             {.is_causal = true, .sequence_parallel = true}))),
        norm2(
            register_module("norm2", nn::SequenceParallelLayerNorm(kFeatures))),
        up(register_module(
            "up", nn::ColumnParallelLinear(kFeatures, kHidden,
                                           {.sequence_parallel = true}))),
        down(register_module(
            "down", nn::RowParallelLinear(kHidden, kFeatures,
                                          {.sequence_parallel = true}))),
        head(register_module(
            "head", nn::ColumnParallelLinear(
                        kFeatures, kClasses,
                        {.bias = false, .sequence_parallel = true}))) {}
  at::Tensor loss(const at::Tensor& data) {
    auto tokens = data.view({kBatch, kLength + 1}).to(at::kLong);
    auto x = embedding(tokens.narrow(1, 0, kLength));
    x = x + attention(norm1(x));
    x = x + down(at::gelu(up(norm2(x))));
    return nn::vocab_parallel_cross_entropy(head(x),
                                            tokens.narrow(1, 1, kLength));
  }
  nn::VocabParallelEmbedding embedding;
  nn::SequenceParallelLayerNorm norm1;
  nn::ParallelSelfAttention attention;
  nn::SequenceParallelLayerNorm norm2;
  nn::ColumnParallelLinear up;
  nn::RowParallelLinear down;
  nn::ColumnParallelLinear head;
};

template <typename Model>
std::shared_ptr<Model> made() {
  torch::manual_seed(4);
  auto model = std::make_shared<Model>();
  model->to(at::kDouble);
  return model;
}

at::Tensor mlp_data() {
  torch::manual_seed(5);
  return torch::randn({kBatch * kLength * kFeatures}, at::kDouble);
}

at::Tensor transformer_data() {
  torch::manual_seed(5);
  return torch::randint(kClasses, {kBatch * (kLength + 1)}).to(at::kDouble);
}

// Collective: gathers the parameters.
void write_input(const World& world, const fs::path& file,
                 const torch::nn::Module& model, const at::Tensor& data) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : model.parameters()) {
    parts.push_back(whole_of(parameter, parameter).flatten());
  }
  parts.push_back(data);
  auto flat = torch::cat(parts);
  if (world.rank != 0) return;
  std::ofstream(file, std::ios::binary)
      .write(static_cast<const char*>(flat.data_ptr()),
             static_cast<std::streamsize>(flat.nbytes()));
}

template <typename Model>
void expect_parity(Model& model, const at::Tensor& data, const fs::path& file) {
  SCOPED_TRACE(file.filename().string());
  auto bytes = testing::read_file(file);
  auto all = torch::from_blob(
      bytes.data(), {static_cast<int64_t>(bytes.size() / 8)}, at::kDouble);
  int64_t at = 0;
  auto expect_next = [&](const at::Tensor& have, const std::string& what) {
    ASSERT_LE(at + have.numel(), all.numel()) << what;
    auto want = all.narrow(0, at, have.numel()).view(have.sizes());
    at += have.numel();
    testing::expect_close(have, want, kBound, what);
  };
  torch::optim::SGD optimizer(model.parameters(), kLearningRate);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    optimizer.zero_grad();
    auto loss = model.loss(data);
    loss.backward();
    expect_next(loss, "loss");
    for (const auto& item : model.named_parameters()) {
      expect_next(whole_of(item.value().grad(), item.value()),
                  "gradient of " + item.key());
    }
    optimizer.step();
  }
  for (const auto& item : model.named_parameters()) {
    expect_next(whole_of(item.value(), item.value()), item.key());
  }
  EXPECT_EQ(at, all.numel());
}

WORLD_TEST(TensorParity, PythonsParallelizeModule, 2) {
  auto group = init_process_group();
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  auto mlp = made<Mlp>();
  auto transformer = made<SequenceTransformer>();
  const fs::path folder = world.folder / "tensor";
  if (world.rank == 0) fs::create_directory(folder);
  barrier();
  write_input(world, folder / "mlp.input", *mlp, mlp_data());
  write_input(world, folder / "transformer.input", *transformer,
              transformer_data());
  if (world.rank == 0) {
    testing::run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR
                       "/tests/parallel/tensor/tensor_parallel_peer.py",
                       folder.string()},
         .ranks = 2,
         .environment = {"TMPDIR=" + folder.string()}});
  }
  barrier();
  ASSERT_TRUE(fs::exists(folder / "transformer.output"));
  expect_parity(*mlp, mlp_data(), folder / "mlp.output");
  expect_parity(*transformer, transformer_data(),
                folder / "transformer.output");
}

}  // namespace
}  // namespace lockstep::internal
