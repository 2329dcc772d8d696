#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

// The batches of a pass on this process. Batch i has the indices from ends[i -
// 1] (0 for the first batch) up to ends[i], which is not included.
struct BatchList {
  std::vector<size_t> indices{};
  std::vector<size_t> ends{};
  // The place of each index in the global order of the epoch, and the epoch, as
  // in PassPlaces. The loader makes the seeds of samples from them. As long as
  // `indices`.
  std::vector<int64_t> places{};
  std::optional<int64_t> epoch{};
};

// Decides which samples are in each batch of this process. A DataLoader takes
// it instead of a Sampler if the batches shall not simply be the next
// `batch_size` indices: what Python calls a batch_sampler. Derive from it for
// batches of your own.
//
// The rest is as for a Sampler: the loader refers to it and never copies it; a
// pass is one loop over the loader; it belongs to the thread of the loop.
class SamplerOfBatches {
 public:
  virtual ~SamplerOfBatches() = default;

  // Starts a pass and returns its batches; none of them is empty.
  virtual BatchList begin_pass() = 0;

  // Tells the sampler that the loop has received the next batch of the pass.
  virtual void consumed_batch() = 0;

  // Returns the number of batches in a whole pass (one that was not resumed).
  virtual int64_t size() const = 0;

  // Returns the size of the dataset that the indices refer to.
  virtual int64_t dataset_size() const = 0;

  // Returns whether the dataset may be larger than dataset_size(), because the
  // sampler selects some of its samples. Otherwise a loader refuses it: the
  // samples at the end would never be visited. By default false.
  virtual bool takes_larger_dataset() const { return false; }
};

}  // namespace lockstep
