#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/data/apply_transform.h"
#include "lockstep/data/dataset_access.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sample_seed.h"

namespace lockstep {

// Gives whole batches of `dataset`, changed by `transform`: for what is cheaper
// for many samples at once, or mixes samples (mixup). The transform gets what a
// DataLoader's loop over `dataset` would get: samples are collated before
// (default_collate()), so that tensors are [B, ...]; what a dataset of whole
// batches gives is left as it is. Otherwise it is called as MapDataset calls
// it.
//
// Random numbers depend on the seeds of the batch's samples, in their order:
// not on the workers, but on the batch size and on the number of ranks. As in
// MapDataset, the dataset below gets derived seeds.
//
// There are no single samples any more, so MapDataset, ConcatDataset and
// AnyDataset cannot stand on top of it.
template <class D, class F>
class BatchMapDataset {
 public:
  BatchMapDataset(D dataset, F transform)
      : dataset_(std::move(dataset)), transform_(std::move(transform)) {}

  // Requires one seed for each index.
  auto get_batch(c10::ArrayRef<size_t> indices,
                 c10::ArrayRef<SampleSeed> seeds) const {
    std::vector<SampleSeed> below;
    if constexpr (internal::TakesSeeds<D>) {
      below.reserve(seeds.size());
      for (const SampleSeed seed : seeds) below.push_back(seed.derived());
    }
    auto fetched = dataset_.get_batch(indices, below);
    SampleRandom random(internal::seed_of_batch(seeds));
    using Held = typename internal::HeldDataset<D>::Held;
    if constexpr (internal::kFetchesSamples<Held> ||
                  internal::IsListOfKnownSamples<decltype(fetched)>::value) {
      return internal::apply_transform(
          transform_, internal::collate_samples(std::move(fetched)), random);
    } else {
      return internal::apply_transform(transform_, std::move(fetched), random);
    }
  }

  // Returns a batch to look at: its random numbers depend on `indices` only, so
  // that they are the same each time.
  auto get_batch(c10::ArrayRef<size_t> indices) const {
    return get_batch(indices, internal::seeds_of_indices(indices));
  }

  size_t size() const { return dataset_.size(); }

 private:
  internal::HeldDataset<D> dataset_;
  F transform_;
};

}  // namespace lockstep
