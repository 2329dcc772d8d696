#include "lockstep/data/weighted_random_sampler.h"

namespace lockstep {

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
