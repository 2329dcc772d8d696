#include "lockstep/data/weighted_draw.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

#include "lockstep/data/resumable_sampler.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kMostWeights = 1 << 24;

void check_weights(const std::string& sampler, const at::Tensor& weights,
                   int64_t num_samples, bool replacement) {
  const int64_t size = weights.size(0);
  if (size > kMostWeights) {
    throw std::invalid_argument(sampler + ": there are " +
                                std::to_string(size) +
                                " weights; torch.multinomial takes " +
                                std::to_string(kMostWeights) + " at most");
  }
  const double* values = weights.const_data_ptr<double>();
  int64_t positive = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (!(values[i] >= 0) || !std::isfinite(values[i])) {
      throw std::invalid_argument(sampler + ": weight " + std::to_string(i) +
                                  " is " + std::to_string(values[i]) +
                                  "; weights must be finite and 0 or more");
    }
    if (values[i] > 0) ++positive;
  }
  if (positive == 0) {
    throw std::invalid_argument(
        sampler + ": none of the " + std::to_string(size) +
        " weights is above 0, so that there is nothing to draw");
  }
  if (!replacement && num_samples > positive) {
    throw std::invalid_argument(
        sampler + ": num_samples is " + std::to_string(num_samples) +
        ", but only " + std::to_string(positive) +
        " weights are above 0; draw fewer samples, or with replacement");
  }
}

}  // namespace

WeightedDraw::WeightedDraw(const char* sampler, const at::Tensor& weights,
                           int64_t num_samples, bool replacement)
    : num_samples_(checked_samples(sampler, num_samples)),
      replacement_(replacement) {
  if (!weights.defined() || weights.dim() != 1) {
    throw std::invalid_argument(
        std::string(sampler) + ": the weights " +
        (weights.defined()
             ? "have " + std::to_string(weights.dim()) + " dimensions"
             : "are undefined") +
        "; give a tensor of one dimension, with one weight for each sample");
  }
  weights_ = weights.detach()
                 .to(at::TensorOptions(at::kDouble).device(at::kCPU),
                     /*non_blocking=*/false, /*copy=*/true)
                 .contiguous();
  check_weights(sampler, weights_, num_samples, replacement);
  Digest digest;
  const double* values = weights_.const_data_ptr<double>();
  for (int64_t i = 0; i < weights_.size(0); ++i) {
    digest.add(std::bit_cast<uint64_t>(values[i]));
  }
  digest_ = static_cast<int64_t>(digest.value());
}

at::Tensor WeightedDraw::order(uint64_t generator_seed) const {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(generator_seed);
  return at::multinomial(weights_, num_samples_, replacement_, generator);
}

std::vector<EpochState::Fixed> WeightedDraw::entries() const {
  return {{.name = "num_samples", .value = num_samples_},
          {.name = "replacement",
           .value = replacement_ ? 1 : 0,
           .kind = EpochState::Fixed::Kind::flag},
          {.name = "weights",
           .value = digest_,
           .kind = EpochState::Fixed::Kind::digest}};
}

at::Tensor weights_tensor(const std::vector<double>& weights) {
  return at::tensor(weights, at::TensorOptions(at::kDouble).device(at::kCPU));
}

}  // namespace lockstep::internal
