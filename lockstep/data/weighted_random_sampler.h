#pragma once

#include <vector>

#include "lockstep/data/resumable_sampler.h"
#include "lockstep/data/weighted_draw.h"

namespace lockstep {

// The arguments of torch.utils.data.WeightedRandomSampler, and a seed instead
// of its generator.
struct WeightedRandomSamplerOptions {
  // Whether a sample can be drawn several times in an epoch.
  bool replacement{true};

  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Draws samples with the given probabilities, in this process alone:
// torch.utils.data.WeightedRandomSampler. In epoch e it gives the same indices
// as Python's with `generator=torch.Generator().manual_seed(seed + e)`. Ranks
// that share a dataset take DistributedWeightedSampler.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch.
// position(), state_dict() and load_state_dict() are those of ResumableSampler;
// the state has the entries epoch, seed, position, dataset_size, num_samples,
// replacement (0 or 1) and weights (a digest of them).
class WeightedRandomSampler : public internal::ResumableSampler {
 public:
  // `weights`: one for each sample of the dataset, of any type and on any
  // device; they are copied. They need not add up to 1. `num_samples` are drawn
  // in an epoch.
  //
  // Throws std::invalid_argument if a weight is negative or not finite, if none
  // is above 0, if there are more than 2^24, if `num_samples` is not 1 or more,
  // or if that many cannot be drawn without replacement.
  WeightedRandomSampler(const at::Tensor& weights, int64_t num_samples,
                        const WeightedRandomSamplerOptions& options = {});
  WeightedRandomSampler(const std::vector<double>& weights, int64_t num_samples,
                        const WeightedRandomSamplerOptions& options = {});

 protected:
  at::Tensor order(uint64_t generator_seed) const override {
    return draw_.order(generator_seed);
  }
  std::vector<internal::EpochState::Fixed> order_entries() const override {
    return draw_.entries();
  }

 private:
  WeightedRandomSampler(internal::WeightedDraw draw, int64_t seed);

  internal::WeightedDraw draw_;
};

}  // namespace lockstep
