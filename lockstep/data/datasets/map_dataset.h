#pragma once

#include <cstddef>
#include <utility>

#include "lockstep/data/apply_transform.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sample_seed.h"

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
      : dataset_(std::move(dataset)), transform_(std::move(transform)) {}

  auto get(size_t index, SampleSeed seed) const {
    SampleRandom random(seed);
    return internal::apply_transform(
        transform_, dataset_.get(index, seed.derived()), random);
  }

  // Returns a sample to look at: its random numbers depend on `index` only, so
  // that they are the same each time.
  auto get(size_t index) const {
    return get(index, internal::seed_of_index(index));
  }

  size_t size() const { return dataset_.size(); }

 private:
  internal::HeldDataset<D> dataset_;
  F transform_;
};

}  // namespace lockstep
