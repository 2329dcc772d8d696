#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sampler.h"

namespace lockstep::internal {

// The batches of one pass of a loader. Does not change while the pass runs, so
// that workers may read it.
class PassPlan {
 public:
  // Batches of `batch_size` indices of the sampler's next pass. `pass` counts
  // the loader's passes and stands for the epoch of a sampler without epochs.
  PassPlan(Sampler& sampler, int64_t batch_size, bool drop_last, int64_t pass);
  // The batches of the sampler's next pass.
  PassPlan(SamplerOfBatches& sampler, int64_t pass);

  int64_t batches() const { return batches_; }

  // Returns the indices of one batch.
  c10::ArrayRef<size_t> indices(int64_t batch) const {
    const auto [begin, end] = range(batch);
    return {indices_.data() + begin, end - begin};
  }

  // Returns the seed of each sample of one batch.
  std::vector<SampleSeed> seeds(int64_t batch, int64_t seed) const;

 private:
  std::pair<size_t, size_t> range(int64_t batch) const {
    const auto i = static_cast<size_t>(batch);
    if (!ends_.empty()) return {i == 0 ? 0 : ends_[i - 1], ends_[i]};
    return {i * batch_size_, std::min((i + 1) * batch_size_, indices_.size())};
  }

  std::vector<size_t> indices_;
  std::vector<size_t> ends_;  // none if all batches have batch_size_
  std::vector<int64_t> places_of_indices_;  // none if they are as in places_
  PassPlaces places_;
  int64_t epoch_ = 0;
  size_t batch_size_ = 0;
  int64_t batches_ = 0;
};

// Returns how many batches so many samples make.
int64_t batches_of(int64_t samples, int64_t batch_size, bool drop_last);

}  // namespace lockstep::internal
