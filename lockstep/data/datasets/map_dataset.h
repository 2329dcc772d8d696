#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <utility>

#include "lockstep/data/mapped.h"
#include "lockstep/data/sample_random.h"

namespace lockstep {

// Gives the samples of `dataset` changed by `transform`, each when it is asked
// for:
//
//   MapDataset train(files, Compose(RandomResizedCrop(224), ToFloat()));
//   DataLoader loader(train, sampler, {.batch_size = 32, .seed = 1});
//
// `transform` is called as const and, if the loader has several workers, by
// several threads at once. It takes the sample, or, if the sample is a
// torch::data::Example with a tensor, the tensor alone; the target then stays
// as it is. (A generic lambda is given the sample.) Its second parameter may be
// a SampleRandom&; all that is random must be drawn from it.
//
// Random numbers depend on the SampleSeed and on nothing else. A DataLoader
// gives each sample another seed in each epoch, and this dataset gives a seed
// that it derives to the dataset below, so MapDatasets on top of each other
// draw different numbers.
//
// `dataset` is copied (lockstep/data/dataset.h).
//
// Threads: several may call get(), as far as `dataset` and `transform` allow
// it.
template <class D, class F>
class MapDataset {
  static_assert(internal::HasSamples<D>,
                "lockstep::MapDataset needs single samples: give the dataset a "
                "function get(size_t), or use lockstep::BatchMapDataset");

 public:
  MapDataset(D dataset, F transform)
      : mapped_(std::move(dataset), std::move(transform)) {}

  auto get(size_t index, SampleSeed seed) const {
    return mapped_.get(index, seed);
  }

  // Returns a sample to look at: its random numbers depend on `index` only, so
  // that they are the same each time.
  auto get(size_t index) const {
    return get(index, internal::seed_of_index(index));
  }

  size_t size() const { return mapped_.size(); }

 private:
  internal::Mapped<D, F> mapped_;
};

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
      : mapped_(std::move(dataset), std::move(transform)) {}

  // Requires one seed for each index.
  auto get_batch(c10::ArrayRef<size_t> indices,
                 c10::ArrayRef<SampleSeed> seeds) const {
    return mapped_.get_batch(indices, seeds);
  }

  // Returns a batch to look at: its random numbers depend on `indices` only, so
  // that they are the same each time.
  auto get_batch(c10::ArrayRef<size_t> indices) const {
    return get_batch(indices, internal::seeds_of_indices(indices));
  }

  size_t size() const { return mapped_.size(); }

 private:
  internal::Mapped<D, F> mapped_;
};

}  // namespace lockstep
