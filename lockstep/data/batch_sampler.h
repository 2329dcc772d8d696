#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/sampler.h"

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

// The samplers that a DataLoader takes.
template <class T>
concept AnySampler =
    std::derived_from<T, Sampler> || std::derived_from<T, SamplerOfBatches>;

// Makes batches of the next `batch_size` indices of a sampler, as
// torch.utils.data.BatchSampler does. A DataLoader with this sampler, or with
// the sampler below and the options batch_size and drop_last, gives the same
// batches.
//
// It refers to the sampler, which must outlive it. Epoch and state are those of
// the sampler: call its set_epoch(), state_dict() and load_state_dict().
class BatchSampler : public SamplerOfBatches {
 public:
  // `drop_last`: whether to leave out a last batch that would be smaller.
  // Throws std::invalid_argument if `batch_size` is not 1 or more.
  BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last = false);

  BatchList begin_pass() override;
  void consumed_batch() override;
  int64_t size() const override;
  int64_t dataset_size() const override { return sampler_.dataset_size(); }
  bool takes_larger_dataset() const override {
    return sampler_.takes_larger_dataset();
  }

 private:
  Sampler& sampler_;
  int64_t batch_size_;
  bool drop_last_;
  int64_t batches_left_ = 0;
};

}  // namespace lockstep
