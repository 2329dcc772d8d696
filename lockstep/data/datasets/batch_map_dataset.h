#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "lockstep/data/apply_transform.h"
#include "lockstep/data/dataset_access.h"
#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/datasets/map_dataset.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {

// Gives whole batches of `dataset`, changed by `transform`: for what is cheaper
// for many samples at once, or mixes samples (mixup). The transform gets what a
// DataLoader's loop would get: samples that are torch::data::Example are
// stacked before ([B, ...]). Otherwise it is called as MapDataset calls it.
//
// Random numbers depend on the seed, the epoch and the numbers of the batch's
// samples, in their order: not on the workers, but on the batch size and on the
// number of ranks.
//
// There are no single samples any more, so MapDataset, ConcatDataset and
// AnyDataset cannot stand on top of it.
template <class D, class F>
class BatchMapDataset {
 public:
  BatchMapDataset(D dataset, F transform, MapOptions options = {})
      : dataset_(std::move(dataset)),
        transform_(std::move(transform)),
        options_(options) {}

  auto get_batch(c10::ArrayRef<size_t> indices) const {
    SampleRandom random(options_.seed, epoch_, internal::number_of(indices),
                        dataset_.random_streams());
    auto fetched = dataset_.get_batch(indices);
    if constexpr (internal::IsListOfKnownSamples<decltype(fetched)>::value) {
      return internal::apply_transform(
          transform_, internal::collate_samples(std::move(fetched)), random);
    } else {
      return internal::apply_transform(transform_, std::move(fetched), random);
    }
  }

  size_t size() const { return dataset_.size(); }

  // As in MapDataset.
  void set_epoch(int64_t epoch) {
    epoch_ = epoch;
    dataset_.set_epoch(epoch);
  }
  int64_t epoch() const { return epoch_; }
  uint64_t random_streams() const { return dataset_.random_streams() + 1; }

 private:
  internal::HeldDataset<D> dataset_;
  F transform_;
  MapOptions options_;
  int64_t epoch_ = 0;
};

}  // namespace lockstep
