#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

// A model of stages in float64, and its batches; the same on all ranks.
namespace lockstep::internal::testing {

inline constexpr int kSteps = 20;
inline constexpr double kBound = 1e-10;
inline constexpr int64_t kWidth = 5;

// Each stage is a Linear, a Tanh and a LayerNorm.
inline torch::nn::Sequential whole_model(int stages) {
  torch::manual_seed(11);
  torch::nn::Sequential model;
  for (int i = 0; i < stages; ++i) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
    model->push_back(torch::nn::Tanh());
    // A large eps: a row of nearly equal numbers would enlarge rounding errors.
    model->push_back(
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}).eps(0.1)));
  }
  model->to(torch::kDouble);
  return model;
}

inline std::vector<int64_t> begins_of(int stages) {
  std::vector<int64_t> begins;
  for (int i = 0; i < stages; ++i) begins.push_back(3 * i);
  return begins;
}

struct Batch {
  at::Tensor x;
  at::Tensor y;
};
inline Batch batch_of(int step, int64_t rows) {
  torch::manual_seed(100 + step);
  return {torch::randn({rows, kWidth}, torch::kDouble),
          torch::randn({rows, kWidth}, torch::kDouble)};
}

inline at::Tensor mse(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

inline double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace lockstep::internal::testing
