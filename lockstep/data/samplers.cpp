#include "lockstep/data/samplers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

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

namespace lockstep {

SequentialSampler::SequentialSampler(int64_t dataset_size)
    : ResumableSampler(
          "SequentialSampler",
          internal::checked_size("SequentialSampler", dataset_size),
          dataset_size, /*seed=*/0, internal::Share{}, NextPass::next_epoch) {}

namespace {

int64_t checked_samples(int64_t dataset_size,
                        const RandomSamplerOptions& options) {
  internal::checked_size("RandomSampler", dataset_size);
  if (dataset_size == 0) {
    throw std::invalid_argument(
        "RandomSampler: the dataset is empty; give one with 1 sample or more, "
        "or use SequentialSampler or DistributedSampler, which allow it");
  }
  return internal::checked_samples("RandomSampler",
                                   options.num_samples.value_or(dataset_size));
}

}  // namespace

RandomSampler::RandomSampler(int64_t dataset_size,
                             const RandomSamplerOptions& options)
    : ResumableSampler("RandomSampler", checked_samples(dataset_size, options),
                       dataset_size, options.seed, internal::Share{},
                       NextPass::next_epoch),
      num_samples_(options.num_samples.value_or(dataset_size)),
      replacement_(options.replacement) {}

at::Tensor RandomSampler::order(uint64_t generator_seed) const {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(generator_seed);
  const auto type = at::TensorOptions(at::kLong).device(at::kCPU);
  const int64_t size = dataset_size();
  if (replacement_) {
    return at::randint(size, {num_samples_}, generator, type);
  }
  std::vector<at::Tensor> parts;
  for (int64_t drawn = 0; drawn < num_samples_; drawn += size) {
    at::Tensor part = at::randperm(size, generator, type);
    parts.push_back(part.narrow(0, 0, std::min(size, num_samples_ - drawn)));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

std::vector<internal::EpochState::Fixed> RandomSampler::order_entries() const {
  return {{.name = "num_samples", .value = num_samples_},
          {.name = "replacement",
           .value = replacement_ ? 1 : 0,
           .kind = internal::EpochState::Fixed::Kind::flag}};
}

namespace {

int64_t digest_of_indices(const std::vector<size_t>& indices) {
  internal::Digest digest;
  for (const size_t index : indices) digest.add(uint64_t{index});
  return static_cast<int64_t>(digest.value());
}

int64_t size_for(const std::vector<size_t>& indices) {
  return indices.empty()
             ? 0
             : static_cast<int64_t>(*std::ranges::max_element(indices)) + 1;
}

}  // namespace

SubsetRandomSampler::SubsetRandomSampler(
    std::vector<size_t> indices, const SubsetRandomSamplerOptions& options)
    : ResumableSampler("SubsetRandomSampler",
                       static_cast<int64_t>(indices.size()), size_for(indices),
                       options.seed, internal::Share{}, NextPass::next_epoch),
      indices_(std::move(indices)),
      digest_(digest_of_indices(indices_)) {}

at::Tensor SubsetRandomSampler::order(uint64_t generator_seed) const {
  at::Tensor order = internal::random_order(
      static_cast<int64_t>(indices_.size()), generator_seed);
  int64_t* values = order.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < indices_.size(); ++i) {
    values[i] = static_cast<int64_t>(indices_[values[i]]);
  }
  return order;
}

std::vector<internal::EpochState::Fixed> SubsetRandomSampler::order_entries()
    const {
  return {{.name = "indices",
           .value = digest_,
           .kind = internal::EpochState::Fixed::Kind::digest}};
}

WeightedRandomSampler::WeightedRandomSampler(internal::WeightedDraw draw,
                                             int64_t seed)
    : ResumableSampler("WeightedRandomSampler", draw.num_samples(),
                       draw.dataset_size(), seed, internal::Share{},
                       NextPass::next_epoch),
      draw_(std::move(draw)) {}

WeightedRandomSampler::WeightedRandomSampler(
    const at::Tensor& weights, int64_t num_samples,
    const WeightedRandomSamplerOptions& options)
    : WeightedRandomSampler(
          internal::WeightedDraw("WeightedRandomSampler", weights, num_samples,
                                 options.replacement),
          options.seed) {}

WeightedRandomSampler::WeightedRandomSampler(
    const std::vector<double>& weights, int64_t num_samples,
    const WeightedRandomSamplerOptions& options)
    : WeightedRandomSampler(internal::weights_tensor(weights), num_samples,
                            options) {}

}  // namespace lockstep
