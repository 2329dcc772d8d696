#pragma once

#include <optional>
#include <vector>

#include "lockstep/data/dataset_size.h"
#include "lockstep/data/resumable_sampler.h"

namespace lockstep {

// The arguments of torch.utils.data.RandomSampler, and a seed instead of its
// generator.
struct RandomSamplerOptions {
  // Whether each sample is drawn from the whole dataset, so that some come
  // twice and others not at all.
  bool replacement{false};

  // The number of samples in an epoch, 1 or more. Without replacement a number
  // above the dataset's size goes through several whole orders. None means the
  // dataset's size.
  std::optional<int64_t> num_samples{};

  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Visits samples in random order, in this process alone:
// torch.utils.data.RandomSampler. In epoch e it gives the same indices as
// Python's with `generator=torch.Generator().manual_seed(seed + e)`. Ranks that
// share a dataset take DistributedSampler.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch, so that
// a program of one process needs no set_epoch(). position(), state_dict() and
// load_state_dict() are those of ResumableSampler; the state has the entries
// epoch, seed, position, dataset_size, num_samples and replacement (0 or 1).
class RandomSampler : public internal::ResumableSampler {
 public:
  // Throws std::invalid_argument if the number of samples is not 1 or more, or
  // if there is nothing to draw from.
  explicit RandomSampler(int64_t dataset_size,
                         const RandomSamplerOptions& options = {});

  // The same for all samples of a dataset (lockstep/data/dataset.h).
  template <internal::KnowsSize D>
  explicit RandomSampler(const D& dataset,
                         const RandomSamplerOptions& options = {})
      : RandomSampler(internal::size_of(dataset), options) {}

  explicit RandomSampler(  // no such option
      internal::AnySize, ...) = delete;

 protected:
  at::Tensor order(uint64_t generator_seed) const override;
  std::vector<internal::EpochState::Fixed> order_entries() const override;

 private:
  int64_t num_samples_;
  bool replacement_;
};

}  // namespace lockstep
