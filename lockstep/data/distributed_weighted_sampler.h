#pragma once

#include <optional>
#include <vector>

#include "lockstep/data/resumable_sampler.h"
#include "lockstep/data/weighted_draw.h"

namespace lockstep {

struct DistributedWeightedSamplerOptions {
  // As in DistributedSamplerOptions.
  std::optional<int64_t> num_replicas{};
  std::optional<int64_t> rank{};

  // Whether a sample can be drawn several times in an epoch.
  bool replacement{true};

  // Epoch e is drawn by generator seed `seed + e`. Must be the same on all
  // ranks.
  int64_t seed{0};

  // As in DistributedSamplerOptions, about the `num_samples` that are drawn.
  bool drop_last{false};
  bool pad{true};
};

// Gives each rank its own part of samples that are drawn with the given
// probabilities. All ranks draw the same `num_samples` indices, those of
// WeightedRandomSampler, and rank r takes places r, r + num_replicas, ... of
// them.
//
//   // Two classes, one of them rare: both are drawn equally often.
//   auto counts = torch::bincount(labels).to(torch::kDouble);
//   DistributedWeightedSampler sampler(counts.reciprocal().index({labels}),
//                                      labels.size(0));
//
// Call set_epoch() before every epoch; without it every pass draws what epoch 0
// draws. position(), state_dict() and load_state_dict() are those of
// ResumableSampler; the state has the entries of WeightedRandomSampler's.
class DistributedWeightedSampler : public internal::ResumableSampler {
 public:
  // `num_samples`: how many all ranks together draw in an epoch. Throws
  // std::invalid_argument as WeightedRandomSampler and DistributedSampler do.
  DistributedWeightedSampler(
      const at::Tensor& weights, int64_t num_samples,
      const DistributedWeightedSamplerOptions& options = {});
  DistributedWeightedSampler(
      const std::vector<double>& weights, int64_t num_samples,
      const DistributedWeightedSamplerOptions& options = {});

 protected:
  at::Tensor order(uint64_t generator_seed) const override {
    return draw_.order(generator_seed);
  }
  std::vector<internal::EpochState::Fixed> order_entries() const override {
    return draw_.entries();
  }

 private:
  DistributedWeightedSampler(internal::WeightedDraw draw,
                             const DistributedWeightedSamplerOptions& options);

  internal::WeightedDraw draw_;
};

}  // namespace lockstep
