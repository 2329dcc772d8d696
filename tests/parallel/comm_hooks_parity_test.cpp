// Compares the hooks with Python's on the same gradients; comm_hooks_peer.py
// runs once under torchrun for all cases.

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
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::World;

constexpr int64_t kSteps = 6;  // PowerSGD compresses from the third on

// The shapes in each bucket: matrices, two of them alike, a kernel of a
// convolution, vectors.
const json kBuckets =
    json::parse("[[[32, 16], [32], [4, 2, 3, 3], [32, 16]], [[10, 32], [10]]]");

struct Case {
  std::string name;
  std::string hook;
  std::string wrapper{};
  json state{};  // Python's arguments
  std::string dtype{"float32"};
  double bound{0};

  torch::ScalarType scalar_type() const {
    return dtype == "float64" ? torch::kDouble : torch::kFloat;
  }
};

// A sum of two ranks is the same in either order, so most results are equal bit
// by bit. PowerSGD divides by norms and multiplies matrices: it differs by
// rounding of the last bit, which six steps enlarge.
constexpr double kFloatBound = 1e-6;
constexpr double kHalfBound = 2e-3;

json power(json options = json::object()) {
  options["start_powerSGD_iter"] = 2;
  return options;
}

// Returns [m r] of each compressed matrix of kBuckets, for matrices of rank 1.
json first_qs() {
  torch::manual_seed(11);
  json all;
  for (int64_t count : {16 + 16 + 18, 32}) {
    auto q = torch::randn({count}, torch::kDouble);
    all.push_back(std::vector<double>(q.data_ptr<double>(),
                                      q.data_ptr<double>() + count));
  }
  return all;
}

std::vector<Case> all_cases() {
  const std::string power_sgd = "powerSGD_hook";
  const std::string batched = "batched_powerSGD_hook";
  return {
      {"allreduce", "allreduce_hook"},
      {"fp16", "fp16_compress_hook"},
      {"bf16", "bf16_compress_hook"},
      {"fp16_wrapper", "allreduce_hook", "fp16_compress_wrapper"},
      {"bf16_wrapper", "allreduce_hook", "bf16_compress_wrapper"},
      {"fp16_float64", "fp16_compress_hook", "", {}, "float64"},
      {"per_tensor", "quantization_pertensor_hook"},
      {"per_channel", "quantization_perchannel_hook"},
      {"power", power_sgd, "", power(), "float32", kFloatBound},
      {"power_given", power_sgd, "", power({{"q_memory", first_qs()}}),
       "float32", kFloatBound},
      {"power_float64", power_sgd, "", power(), "float64", 1e-12},
      {"power_rank_2", power_sgd, "", power({{"matrix_approximation_rank", 2}}),
       "float32", kFloatBound},
      // Uses QR, whose rounding may turn the sign of a column; here it does
      // not.
      {"power_rank_4", power_sgd, "",
       power({{"matrix_approximation_rank", 4}, {"min_compression_rate", 1.0}}),
       "float32", kFloatBound},
      {"power_plain", power_sgd, "",
       power({{"use_error_feedback", false}, {"warm_start", false}}), "float32",
       kFloatBound},
      {"power_seed", power_sgd, "",
       power({{"random_seed", 123}, {"orthogonalization_epsilon", 1e-2}}),
       "float32", kFloatBound},
      {"power_together", power_sgd, "",
       power({{"batch_tensors_with_same_shape", true}}), "float32",
       kFloatBound},
      {"power_fp16", power_sgd, "fp16_compress_wrapper", power(), "float32",
       kHalfBound},
      {"batched", batched, "", power(), "float32", kFloatBound},
      {"batched_rank_3", batched, "", power({{"matrix_approximation_rank", 3}}),
       "float32", kFloatBound},
  };
}

std::shared_ptr<PowerSGDState> make_state(const Case& test) {
  PowerSGDOptions options;
  const auto& given = test.state;
  auto take = [&](const char* name, auto& option) {
    if (given.contains(name)) given.at(name).get_to(option);
  };
  take("matrix_approximation_rank", options.matrix_approximation_rank);
  take("start_powerSGD_iter", options.start_power_sgd_iter);
  take("min_compression_rate", options.min_compression_rate);
  take("use_error_feedback", options.use_error_feedback);
  take("warm_start", options.warm_start);
  take("orthogonalization_epsilon", options.orthogonalization_epsilon);
  take("random_seed", options.random_seed);
  take("batch_tensors_with_same_shape", options.batch_tensors_with_same_shape);
  auto state = std::make_shared<PowerSGDState>(options);
  if (given.contains("q_memory")) {
    for (size_t index = 0; index < kBuckets.size(); ++index) {
      auto q = given.at("q_memory").at(index).get<std::vector<double>>();
      state->q_memory_dict[index] =
          torch::tensor(q, torch::kDouble).to(test.scalar_type());
    }
  }
  return state;
}

CommHook make_hook(const Case& test) {
  CommHook hook;
  if (test.hook == "allreduce_hook") hook = allreduce_hook();
  if (test.hook == "fp16_compress_hook") hook = fp16_compress_hook();
  if (test.hook == "bf16_compress_hook") hook = bf16_compress_hook();
  if (test.hook == "quantization_pertensor_hook") {
    hook = quantization_pertensor_hook();
  }
  if (test.hook == "quantization_perchannel_hook") {
    hook = quantization_perchannel_hook();
  }
  if (test.hook == "powerSGD_hook") hook = power_sgd_hook(make_state(test));
  if (test.hook == "batched_powerSGD_hook") {
    hook = batched_power_sgd_hook(make_state(test));
  }
  if (test.wrapper == "fp16_compress_wrapper") {
    return fp16_compress_wrapper(hook);
  }
  if (test.wrapper == "bf16_compress_wrapper") {
    return bf16_compress_wrapper(hook);
  }
  return hook;
}

int64_t numel_of(const json& shapes) {
  int64_t count = 0;
  for (const auto& shape : shapes) {
    count += c10::multiply_integers(shape.get<std::vector<int64_t>>());
  }
  return count;
}

// Returns a rank's gradients of all steps and buckets.
torch::Tensor input_of(const Case& test, int rank) {
  torch::manual_seed(20 + rank);
  int64_t count = 0;
  for (const auto& shapes : kBuckets) count += numel_of(shapes);
  return torch::randn({kSteps * count}, torch::kDouble).to(test.scalar_type());
}

// Runs all cases in Python, started by rank 0, unless this world has run them
// already. Returns nothing if LibTorch has no Python beside it.
std::optional<fs::path> python_results(const World& world) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) return std::nullopt;
  fs::path folder = world.folder / "python";
  if (world.rank == 0 && fs::create_directory(folder)) {
    json cases;
    for (const Case& test : all_cases()) {
      cases.push_back({{"name", test.name},
                       {"hook", test.hook},
                       {"wrapper", test.wrapper},
                       {"state", test.state},
                       {"dtype", test.dtype},
                       {"steps", kSteps},
                       {"buckets", kBuckets},
                       {"p_memory", {32 + 32 + 4, 10}}});
      for (int rank = 0; rank < world.size; ++rank) {
        auto flat = input_of(test, rank);
        std::ofstream file(
            folder / (test.name + "." + std::to_string(rank) + ".in"),
            std::ios::binary);
        file.write(static_cast<const char*>(flat.data_ptr()),
                   static_cast<std::streamsize>(flat.nbytes()));
      }
    }
    std::ofstream(folder / "cases.json") << cases;
    testing::run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/parallel/comm_hooks_peer.py",
                       folder / "cases.json"},
         .ranks = 2,
         .environment = {"TMPDIR=" + folder.string()}});
  }
  barrier();
  return folder;
}

torch::Tensor results_of(const Case& test, int rank) {
  auto hook = make_hook(test);
  auto input = input_of(test, rank);
  int64_t offset = 0;
  std::vector<torch::Tensor> results;
  for (int64_t step = 0; step < kSteps; ++step) {
    for (size_t index = 0; index < kBuckets.size(); ++index) {
      auto flat = input.narrow(0, offset, numel_of(kBuckets[index])).clone();
      offset += flat.numel();
      std::vector<torch::Tensor> gradients;
      int64_t place = 0;
      for (const auto& json_shape : kBuckets[index]) {
        auto shape = json_shape.get<std::vector<int64_t>>();
        auto count = c10::multiply_integers(shape);
        gradients.push_back(flat.narrow(0, place, count).view(shape));
        place += count;
      }
      GradBucket bucket(index, index + 1 == kBuckets.size(), flat,
                        std::move(gradients), {});
      results.push_back(
          wait_for_tensor(hook(bucket)).to(test.scalar_type()).clone());
    }
  }
  return torch::cat(results);
}

void expect_parity(const World& world, const char* backend) {
  auto group = init_process_group(backend);
  auto python = python_results(world);
  if (!python) GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  for (const Case& test : all_cases()) {
    auto bytes = testing::read_file(
        *python / (test.name + "." + std::to_string(world.rank) + ".out"));
    auto ours = results_of(test, world.rank);
    ASSERT_EQ(bytes.size(), ours.nbytes()) << test.name;
    auto want = torch::from_blob(bytes.data(), ours.sizes(), ours.options());
    EXPECT_LE((ours - want).abs().max().item<double>(), test.bound)
        << test.name;
  }
}

WORLD_TEST(CommHookParity, InSharedMemory, 2) { expect_parity(world, ""); }
WORLD_TEST(CommHookParity, OverGloo, 2) { expect_parity(world, "gloo"); }

}  // namespace
}  // namespace lockstep::internal
