#include "lockstep/data/distributed_sampler.h"

namespace lockstep {

DistributedSampler::DistributedSampler(int64_t dataset_size,
                                       const DistributedSamplerOptions& options)
    : ResumableSampler(
          "DistributedSampler",
          internal::checked_size("DistributedSampler", dataset_size),
          dataset_size, options.seed,
          internal::share_of_rank("DistributedSampler", options.num_replicas,
                                  options.rank, options.drop_last, options.pad),
          NextPass::same_epoch),
      shuffle_(options.shuffle) {}

at::Tensor DistributedSampler::order(uint64_t generator_seed) const {
  return shuffle_ ? internal::random_order(dataset_size(), generator_seed)
                  : at::Tensor();
}

std::vector<internal::EpochState::Fixed> DistributedSampler::order_entries()
    const {
  return {{.name = "shuffle",
           .value = shuffle_ ? 1 : 0,
           .kind = internal::EpochState::Fixed::Kind::flag}};
}

DistributedWeightedSampler::DistributedWeightedSampler(
    internal::WeightedDraw draw,
    const DistributedWeightedSamplerOptions& options)
    : ResumableSampler("DistributedWeightedSampler", draw.num_samples(),
                       draw.dataset_size(), options.seed,
                       internal::share_of_rank(
                           "DistributedWeightedSampler", options.num_replicas,
                           options.rank, options.drop_last, options.pad),
                       NextPass::same_epoch),
      draw_(std::move(draw)) {}

DistributedWeightedSampler::DistributedWeightedSampler(
    const at::Tensor& weights, int64_t num_samples,
    const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(
          internal::WeightedDraw("DistributedWeightedSampler", weights,
                                 num_samples, options.replacement),
          options) {}

DistributedWeightedSampler::DistributedWeightedSampler(
    const std::vector<double>& weights, int64_t num_samples,
    const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(internal::weights_tensor(weights), num_samples,
                                 options) {}

}  // namespace lockstep
