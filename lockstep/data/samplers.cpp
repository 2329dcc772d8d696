#include "lockstep/data/samplers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/state/digest.h"

namespace lockstep {

SequentialSampler::SequentialSampler(DatasetSize dataset_size)
    : ResumableSampler(
          "SequentialSampler", /*seed=*/0,
          {.length = internal::checked_size("SequentialSampler", dataset_size),
           .dataset_size = dataset_size}) {}

namespace {

internal::EpochOrder uniform_order(int64_t size,
                                   const RandomSamplerOptions& options) {
  internal::checked_size("RandomSampler", size);
  if (size == 0) {
    throw std::invalid_argument(
        "RandomSampler: the dataset is empty; give one with 1 sample or more, "
        "or use SequentialSampler or DistributedSampler, which allow it");
  }
  const bool replacement = options.replacement;
  const int64_t count = internal::checked_samples(
      "RandomSampler", options.num_samples.value_or(size));
  return {
      .length = count,
      .dataset_size = size,
      .draw =
          [=](uint64_t generator_seed) {
            auto generator =
                at::make_generator<at::CPUGeneratorImpl>(generator_seed);
            const auto type = at::TensorOptions(at::kLong).device(at::kCPU);
            if (replacement) return at::randint(size, {count}, generator, type);
            std::vector<at::Tensor> parts;
            for (int64_t drawn = 0; drawn < count; drawn += size) {
              at::Tensor part = at::randperm(size, generator, type);
              parts.push_back(part.narrow(0, 0, std::min(size, count - drawn)));
            }
            return parts.size() == 1 ? parts.front() : at::cat(parts);
          },
      .entries = {{.name = "num_samples", .value = count},
                  {.name = "replacement",
                   .value = replacement ? 1 : 0,
                   .kind = internal::EpochState::Fixed::Kind::flag}}};
}

internal::EpochOrder order_of(std::vector<size_t> indices) {
  internal::Digest digest;
  size_t size = 0;
  for (const size_t index : indices) {
    digest.add(uint64_t{index});
    size = std::max(size, index + 1);
  }
  const auto count = static_cast<int64_t>(indices.size());
  return {.length = count,
          .dataset_size = static_cast<int64_t>(size),
          .draw =
              [indices = std::move(indices), count](uint64_t generator_seed) {
                at::Tensor order =
                    internal::random_order(count, generator_seed);
                int64_t* values = order.mutable_data_ptr<int64_t>();
                for (int64_t i = 0; i < count; ++i) {
                  values[i] = static_cast<int64_t>(indices[values[i]]);
                }
                return order;
              },
          .entries = {{.name = "indices",
                       .value = static_cast<int64_t>(digest.value()),
                       .kind = internal::EpochState::Fixed::Kind::digest}}};
}

}  // namespace

RandomSampler::RandomSampler(DatasetSize dataset_size,
                             const RandomSamplerOptions& options)
    : ResumableSampler("RandomSampler", options.seed,
                       uniform_order(dataset_size, options)) {}

SubsetRandomSampler::SubsetRandomSampler(
    std::vector<size_t> indices, const SubsetRandomSamplerOptions& options)
    : ResumableSampler("SubsetRandomSampler", options.seed,
                       order_of(std::move(indices))) {}

WeightedRandomSampler::WeightedRandomSampler(
    const at::Tensor& weights, int64_t num_samples,
    const WeightedRandomSamplerOptions& options)
    : ResumableSampler(
          "WeightedRandomSampler", options.seed,
          internal::weighted_order("WeightedRandomSampler", weights,
                                   num_samples, options.replacement)) {}

WeightedRandomSampler::WeightedRandomSampler(
    const std::vector<double>& weights, int64_t num_samples,
    const WeightedRandomSamplerOptions& options)
    : WeightedRandomSampler(internal::weights_tensor(weights), num_samples,
                            options) {}

}  // namespace lockstep
