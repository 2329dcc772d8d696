#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/data/epoch_state.h"

namespace lockstep::internal {

// Draws indices with given probabilities: what both weighted samplers share.
class WeightedDraw {
 public:
  // Keeps a copy of `weights`, as float64 on the CPU. Throws
  // std::invalid_argument, with the name of the sampler, unless they are one
  // dimension of finite numbers >= 0 with one above 0; if there are more than
  // 2^24 (torch.multinomial takes no more); if `num_samples` is not 1 or more;
  // or if there is no replacement and fewer weights are above 0 than samples
  // are drawn.
  WeightedDraw(const char* sampler, const at::Tensor& weights,
               int64_t num_samples, bool replacement);

  int64_t dataset_size() const { return weights_.size(0); }
  int64_t num_samples() const { return num_samples_; }

  // Returns the indices that Python's torch.multinomial draws with a generator
  // seeded so.
  at::Tensor order(uint64_t generator_seed) const;

  std::vector<EpochState::Fixed> entries() const;

 private:
  at::Tensor weights_;
  int64_t num_samples_;
  bool replacement_;
  int64_t digest_;
};

// Returns float64 weights on the CPU.
at::Tensor weights_tensor(const std::vector<double>& weights);

}  // namespace lockstep::internal
