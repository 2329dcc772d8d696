#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/data/resumable_sampler.h"

namespace lockstep {

struct SubsetRandomSamplerOptions {
  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Visits the samples with the given indices in random order, in this process
// alone: torch.utils.data.SubsetRandomSampler. In epoch e it gives the same
// indices as Python's with `generator=torch.Generator().manual_seed(seed + e)`.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch.
// position(), state_dict() and load_state_dict() are those of ResumableSampler;
// the state has the entries epoch, seed, position, dataset_size (the highest
// index + 1) and indices (a digest of them).
class SubsetRandomSampler : public internal::ResumableSampler {
 public:
  // There may be no indices; then there are no samples to visit.
  explicit SubsetRandomSampler(std::vector<size_t> indices,
                               const SubsetRandomSamplerOptions& options = {});

  bool takes_larger_dataset() const override { return true; }

 protected:
  at::Tensor order(uint64_t generator_seed) const override;
  std::vector<internal::EpochState::Fixed> order_entries() const override;

 private:
  std::vector<size_t> indices_;
  int64_t digest_;
};

}  // namespace lockstep
