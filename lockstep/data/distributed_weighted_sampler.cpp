#include "lockstep/data/distributed_weighted_sampler.h"

namespace lockstep {

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
