#pragma once

#include "lockstep/data/dataset_size.h"
#include "lockstep/data/resumable_sampler.h"

namespace lockstep {

// Visits every sample in the dataset's own order, in this process alone:
// torch's SequentialSampler. Ranks that share a dataset take DistributedSampler
// with
// {.shuffle = false}.
//
// position(), state_dict() and load_state_dict() are those of ResumableSampler,
// with the entries epoch, seed (0), position and dataset_size. Without
// set_epoch() each pass counts as the next epoch.
class SequentialSampler : public internal::ResumableSampler {
 public:
  // Throws std::invalid_argument for a negative size.
  explicit SequentialSampler(int64_t dataset_size);

  // The same for all samples of a dataset (lockstep/data/dataset.h).
  template <internal::KnowsSize D>
  explicit SequentialSampler(const D& dataset)
      : SequentialSampler(internal::size_of(dataset)) {}

 protected:
  at::Tensor order(uint64_t) const override { return {}; }
};

}  // namespace lockstep
