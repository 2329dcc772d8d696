// Python's fully_shard and ours train one model from the same values: losses
// and parameters agree. fsdp_peer.py runs once under torchrun for all cases.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace testing;

struct PeerCase {
  std::string name;
  std::string dtype;
  double bound;
  ReshardAfterForward reshard{true};
  int micro{1};
  std::string param_dtype{};
  std::string reduce_dtype{};
};

constexpr int kPeerSteps = 10;

// The last bits of float32 differ, because Gloo and we add in another order;
// rounding to bfloat16 enlarges that.
std::vector<PeerCase> peer_cases(const World& world) {
  if (world.size == 4) return {{"neighbours", "float64", 1e-12, 2}};
  return {
      {"double", "float64", 1e-12},
      {"stays", "float64", 1e-12, false},
      {"micro", "float64", 1e-12, true, 3},
      {"float", "float32", 2e-5},
      {"bfloat16", "float32", 2e-2, true, 2, "bfloat16", "float32"},
  };
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "float64") return at::kDouble;
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

// Returns nothing if LibTorch has no Python beside it.
std::optional<fs::path> fully_shard_results(const World& world) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) return std::nullopt;
  fs::path folder = world.folder / "python";
  if (world.rank == 0 && fs::create_directory(folder)) {
    json cases;
    for (const auto& test : peer_cases(world)) {
      const auto ranks = test.reshard.ranks();
      const json reshard = ranks.value_or(1) == 1 ? json(!ranks) : json(*ranks);
      cases.push_back({{"name", test.name},
                       {"dtype", test.dtype},
                       {"param_dtype", test.param_dtype},
                       {"reduce_dtype", test.reduce_dtype},
                       {"reshard", reshard},
                       {"micro", test.micro},
                       {"steps", kPeerSteps}});
    }
    std::ofstream(folder / "cases.json") << cases;
    run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/parallel/fsdp/fsdp_peer.py",
                       folder / "cases.json"},
         .ranks = world.size,
         .environment = {"TMPDIR=" + folder.string()}});
  }
  barrier();
  return folder;
}

// These are the same as first_values() and tokens_of() of fsdp_peer.py.
at::Tensor first_values(int64_t count, int64_t number) {
  auto numbers =
      (torch::arange(count, torch::kLong) * 37 + 100 * number) % 1009;
  return (numbers - 504).to(torch::kDouble) / 1512;
}
at::Tensor peer_tokens(int batch, int rank) {
  auto numbers = torch::arange(20, torch::kLong) * 7 + 5 * batch + 3 * rank;
  return ((numbers * numbers) % kTokens).view({5, 4});
}

// The values are written when the whole model is sharded, as a program would
// load them.
void write_first_values(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int64_t number = 0;
  for (auto& shard : module.parameters()) {
    const auto* layout = layout_of(shard);
    const auto [begin, end] = *layout->range;
    shard.copy_(first_values(layout->box.numel(), number++)
                    .slice(0, begin, end)
                    .view_as(shard));
  }
}

void expect_peer_agrees(const PeerCase& test, FullyShardOptions options,
                        const World& world, const fs::path& folder) {
  SCOPED_TRACE(test.name);
  if (!test.param_dtype.empty()) {
    options.mp_policy = {.param_dtype = dtype_of(test.param_dtype),
                         .reduce_dtype = dtype_of(test.reduce_dtype)};
  }
  options.reshard_after_forward = test.reshard;
  FullyShard<ShardedNet> model(
      [&] { return ShardedNet(options, 3, dtype_of(test.dtype)); }, options);
  write_first_values(*model.ptr());
  torch::optim::AdamW optimizer(model->parameters(), adamw());
  const auto want = json::parse(read_file(
      folder / (test.name + "." + std::to_string(world.rank) + ".json")));
  for (int step = 0; step < kPeerSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < test.micro; ++micro) {
      model.set_requires_gradient_sync(micro == test.micro - 1);
      const int batch = step * test.micro + micro;
      const auto tokens = peer_tokens(batch, world.rank);
      const auto loss = loss_of(model(tokens), tokens);
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), want["losses"][batch].get<double>(),
                  test.bound);
    }
    optimizer.step();
  }
  const auto full = full_values(*model.ptr());
  ASSERT_EQ(full.size(), want["parameters"].size());
  for (const auto& item : full) {
    const auto values =
        want["parameters"][item.key()].get<std::vector<double>>();
    const double difference = (item.value().to(torch::kDouble).flatten() -
                               torch::tensor(values, torch::kDouble))
                                  .abs()
                                  .max()
                                  .item<double>();
    EXPECT_LE(difference, test.bound) << item.key();
  }
}

WORLD_TEST(FsdpInterop, LossesAndParametersAreThoseOfPython, 2, 4) {
  std::optional<fs::path> folder;
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    if (!folder) folder = fully_shard_results(world);
    if (!folder) return;
    for (const auto& test : peer_cases(world)) {
      expect_peer_agrees(test, options, world, *folder);
    }
  });
  if (!folder) GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
}

}  // namespace
}  // namespace lockstep::internal
