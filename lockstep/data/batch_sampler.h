#pragma once

#include "lockstep/data/sampler.h"
#include "lockstep/data/sampler_of_batches.h"

namespace lockstep {

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
