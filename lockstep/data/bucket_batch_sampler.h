#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/epoch_order.h"

namespace lockstep {

struct BucketBatchSamplerOptions {
  // Samples in each batch, on each rank.
  int64_t batch_size{1};

  // The lengths at which one bucket ends and the next begins, ascending: n
  // boundaries make n + 1 buckets, and a sample whose length equals a boundary
  // is in the bucket above it. A batch has samples of one bucket. If
  // they are empty, `window` counts.
  std::vector<int64_t> boundaries{};

  // How many steps' samples are sorted by length together. A large window makes
  // the lengths within a batch more alike, and the batches of two epochs, too.
  // Not together with boundaries. None means 100.
  std::optional<int64_t> window{};

  // Whether every epoch has a new order; otherwise buckets follow each other
  // and samples keep the dataset's own order, apart from the sorting.
  bool shuffle{true};

  // Epoch e is shuffled by generator seed `seed + e`. Must be the same on all
  // ranks.
  int64_t seed{0};

  // Whether to leave out batches that would be smaller: up to one in each
  // bucket, or one at the end of the last window.
  bool drop_last{false};

  // As in DistributedSamplerOptions. Most programs leave both.
  std::optional<int64_t> num_replicas{};
  std::optional<int64_t> rank{};

  // Decides about the fewer samples of a smaller step if the number of ranks
  // does not divide them. If it is true, some are repeated, so that every rank
  // has a batch of the same size. If it is false, each sample is visited once,
  // and ranks may differ by a sample, or by a whole batch in each bucket; see
  // DistributedSamplerOptions.
  bool pad{true};
};

// Makes batches of samples of similar length, so that little of a padded batch
// is padding, and shares them between the ranks: in each step all ranks have
// samples of similar length, so that no rank waits long for another one. With
// `pad` or `drop_last` all ranks have the same number of batches.
//
//   std::vector<int64_t> lengths = ...;  // of each sample, in any unit
//   BucketBatchSampler batches(lengths, {.batch_size = 16});
//   DataLoader loader(dataset, batches);
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     batches.set_epoch(epoch);
//     for (auto& batch : loader) { ... }
//   }
//
// The order of an epoch. A generator seeded with `seed + epoch` shuffles all
// samples. They are sorted by length within windows, or put into their buckets.
// What follows each other there is cut into groups, each as large as a *step*:
// batch_size * num_replicas samples, or fewer at the end of a bucket. The same
// generator shuffles the groups; smaller ones come last. A step visits one
// group, and rank r takes places r, r + num_replicas, ... of it.
//
// Resuming. position() counts the samples of the global order that all ranks
// together have consumed; repeated ones do not count. Any number of ranks with
// any batch size can load the state and goes on in the same global order: until
// the epoch ends the groups are those of the run that began it. If the steps
// are smaller than the groups, a step visits a part of a group, and the last
// part may be smaller still. Where that would leave some rank without a batch
// (with `drop_last`, where batches must not be smaller, and without `pad`) a
// step goes on into the next group, whose lengths may differ.
//
// Not synchronised; see SamplerOfBatches.
class BucketBatchSampler : public SamplerOfBatches {
 public:
  // `lengths`: of each sample of the dataset, 0 or more, the same on all ranks.
  // Throws std::invalid_argument for a negative length, options out of range,
  // boundaries that do not ascend, and as DistributedSampler for ranks.
  BucketBatchSampler(std::vector<int64_t> lengths,
                     const BucketBatchSamplerOptions& options = {});

  // Selects the epoch of the next pass. Call it before every epoch, but not
  // while a loop runs; without it every pass has the order of epoch 0. A new
  // epoch starts at its beginning; if `epoch` is the current epoch, a loaded
  // position is kept.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return state_.epoch(); }

  // Returns the batches from the loaded position on, if load_state_dict() was
  // called since the last pass; otherwise those of the whole epoch.
  BatchList begin_pass() override;
  void consumed_batch() override;

  int64_t size() const override;
  int64_t dataset_size() const override {
    return static_cast<int64_t>(lengths_.size());
  }
  int64_t num_replicas() const { return share_.num_replicas; }
  int64_t rank() const { return share_.rank; }
  int64_t position() const { return state_.position(); }

  // Returns the entries epoch, seed, position, dataset_size, shuffle,
  // drop_last, step_size (samples in a step of the run that began the epoch)
  // and buckets (a digest of lengths, boundaries and window).
  std::map<std::string, int64_t> state_dict() const;
  // As ResumableSampler's.
  std::map<std::string, int64_t> next_pass_state() const;

  // Takes over epoch, seed, position and step_size. The rest is as for
  // DistributedSampler's.
  void load_state_dict(const std::map<std::string, int64_t>& state);

 private:
  // The samples of an epoch, and where its groups end.
  struct Order {
    std::vector<size_t> indices;
    std::vector<int64_t> ends;
  };
  // The places [begin, end) that all ranks visit together.
  struct Step {
    int64_t begin;
    int64_t end;
  };

  int64_t own_step_size() const {
    return options_.batch_size * share_.num_replicas;
  }
  std::vector<int64_t> group_sizes(int64_t step_size) const;
  std::vector<size_t> sorted_samples(const int64_t* shuffled,
                                     int64_t step_size) const;
  Order order() const;
  std::vector<Step> steps(const Order& order, int64_t start) const;
  bool batches_are_aligned(const std::vector<Step>& steps) const;
  int64_t samples_of_rank(int64_t samples) const;
  std::vector<internal::EpochState::Fixed> fixed_entries() const;

  std::vector<int64_t> lengths_;
  BucketBatchSamplerOptions options_;
  internal::Share share_;
  int64_t digest_ = 0;
  internal::EpochState state_;
  // Samples in a step of the run that began the epoch.
  int64_t step_size_ = 0;

  // Where the position is after each batch of the current pass.
  std::vector<int64_t> positions_;
  size_t delivered_ = 0;
};

}  // namespace lockstep
