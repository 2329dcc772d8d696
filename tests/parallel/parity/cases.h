#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

// The table of what is trained both by Python's DistributedDataParallel and by
// ours. A new feature is a field here, its use in training.cpp and in peer.py,
// and its rows in cases.cpp.
namespace lockstep::testing {

// What all cases have in common.
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

// One training; the defaults are those of a plain loop. peer.py has the same
// names.
struct Case {
  std::string name{};
  int ranks{2};
  std::string model{"mlp"};  // models.cpp
  std::string dtype{"float64"};
  // "sgd", "sgd_momentum", "adam", "adamw"; with "fused_" in front the kernels
  // of that name on either side.
  std::string optimizer{"sgd"};
  int64_t accumulate{1};    // batches a step, all but the last in no_sync
  double bucket_cap_mb{0};  // 0: the default
  bool broadcast_buffers{true};
  bool find_unused_parameters{false};
  bool static_graph{false};
  bool mixed_precision{false};  // parameters, gradients, buffers in bfloat16
  bool autocast{false};         // in bfloat16
  // Rank 0 trains so many steps less than the others, under join().
  int64_t early{0};
  bool divide_by_initial_world_size{true};
  // "norm" (to kMaxNorm) or "value" (to kClipValue), before each step.
  std::string clip{};
  bool grad_scaler{false};
  // "allreduce", "fp16", "bf16", or "power_sgd" of some rank.
  std::string hook{};
  int64_t power_sgd_rank{1};
  bool batch_tensors_with_same_shape{false};
  // ZeroRedundancyOptimizer: of "parameters", of the "model", with
  // "shared_parameters". To Python these are all one.
  std::string zero{};

  // Beyond rounding: what numbers may differ by at most, and why the case has
  // it. 0: rounding.
  double bound{0};
  // Parameters may be anything: only the losses are compared.
  bool losses_only{false};
  std::vector<std::string> backends{"lockstep", "gloo"};

  double lr() const {
    return optimizer.find("sgd") == std::string::npos ? 1e-2 : 0.05;
  }
};

std::vector<Case> all_cases();

// What peer.py reads: the cases of that many ranks.
void write_cases(const std::filesystem::path& path, int ranks);

}  // namespace lockstep::testing
