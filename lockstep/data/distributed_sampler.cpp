#include "lockstep/data/distributed_sampler.h"

namespace lockstep {
namespace {

template <class Options>
internal::Share share_of(const char* sampler, const Options& options) {
  return internal::share_of_rank(sampler, options.num_replicas, options.rank,
                                 options.drop_last, options.pad);
}

// Returns the order as one that several ranks share.
internal::EpochOrder shared(internal::EpochOrder order) {
  order.next_pass = internal::EpochOrder::NextPass::same_epoch;
  return order;
}

internal::EpochOrder plain_order(int64_t size, bool shuffle) {
  internal::EpochOrder order{
      .length = internal::checked_size("DistributedSampler", size),
      .dataset_size = size,
      .entries = {{.name = "shuffle",
                   .value = shuffle ? 1 : 0,
                   .kind = internal::EpochState::Fixed::Kind::flag}}};
  if (shuffle) {
    order.draw = [size](uint64_t generator_seed) {
      return internal::random_order(size, generator_seed);
    };
  }
  return order;
}

}  // namespace

DistributedSampler::DistributedSampler(DatasetSize dataset_size,
                                       const DistributedSamplerOptions& options)
    : ResumableSampler("DistributedSampler", options.seed,
                       shared(plain_order(dataset_size, options.shuffle)),
                       share_of("DistributedSampler", options)) {}

DistributedWeightedSampler::DistributedWeightedSampler(
    const at::Tensor& weights, int64_t num_samples,
    const DistributedWeightedSamplerOptions& options)
    : ResumableSampler(
          "DistributedWeightedSampler", options.seed,
          shared(internal::weighted_order("DistributedWeightedSampler", weights,
                                          num_samples, options.replacement)),
          share_of("DistributedWeightedSampler", options)) {}

DistributedWeightedSampler::DistributedWeightedSampler(
    const std::vector<double>& weights, int64_t num_samples,
    const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(internal::weights_tensor(weights), num_samples,
                                 options) {}

}  // namespace lockstep
