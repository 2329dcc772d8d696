#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

// The table of trainings that both Python's DistributedDataParallel and ours
// run. A new feature needs a field here, its use in training.cpp and in
// peer.py, and rows in cases.cpp.
namespace lockstep::internal::testing {

// These constants hold for all cases.
inline constexpr int64_t kSamples = 256;
inline constexpr int64_t kBatchSize = 8;  // on each rank
inline constexpr int64_t kSamplerSeed = 3;
inline constexpr int64_t kSteps = 20;  // more than an epoch
inline constexpr double kMaxNorm = 0.1;
inline constexpr double kClipValue = 0.01;
inline constexpr double kInitScale = 1024;
inline constexpr int64_t kGrowthInterval = 3;
inline constexpr int64_t kStartPowerSgd = 3;

// With grad_scaler: this rank's loss is infinite in this step.
struct InfiniteLoss {
  int64_t step;
  int rank;
};
inline constexpr InfiniteLoss kInfiniteLosses[] = {{4, 1}, {11, 0}, {12, 1}};

// One training; the defaults are those of a plain loop. peer.py uses the same
// names.
struct Case {
  std::string name{};
  int ranks{2};
  std::string model{"mlp"};  // models.cpp
  std::string dtype{"float64"};
  // "sgd", "sgd_momentum", "adam" or "adamw"; with the prefix "fused_", both
  // sides use their fused kernels.
  std::string optimizer{"sgd"};
  int64_t accumulate{1};    // batches per step, all but the last in no_sync
  double bucket_cap_mb{0};  // 0 means the default
  bool broadcast_buffers{true};
  bool find_unused_parameters{false};
  bool static_graph{false};
  bool mixed_precision{false};  // parameters, gradients, buffers in bfloat16
  bool autocast{false};         // in bfloat16
  // Rank 0 trains this many steps fewer than the others, under join().
  int64_t early{0};
  bool divide_by_initial_world_size{true};
  // Clips by "norm" (to kMaxNorm) or by "value" (to kClipValue) before each
  // step.
  std::string clip{};
  bool grad_scaler{false};
  // "allreduce", "fp16", "bf16", or "power_sgd" with power_sgd_rank.
  std::string hook{};
  int64_t power_sgd_rank{1};
  bool batch_tensors_with_same_shape{false};
  // How ZeroRedundancyOptimizer is made: of "parameters", of the "model", or
  // with "shared_parameters". Python has only one way.
  std::string zero{};

  // How much numbers may differ beyond rounding; cases.cpp states why a case
  // needs this. 0 means only by rounding.
  double bound{0};
  // Compares only the losses; parameters may have any value.
  bool losses_only{false};
  std::vector<std::string> backends{"lockstep", "gloo"};

  double lr() const {
    return optimizer.find("sgd") == std::string::npos ? 1e-2 : 0.05;
  }
};

std::vector<Case> all_cases();

// Writes the cases of that many ranks for peer.py.
void write_cases(const std::filesystem::path& path, int ranks);

}  // namespace lockstep::internal::testing
