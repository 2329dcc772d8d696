#include "lockstep/data/random_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <stdexcept>

namespace lockstep {
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

}  // namespace lockstep
