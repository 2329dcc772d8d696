#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/data/apply_transform.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"

namespace lockstep {

struct MapOptions {
  // ---- Behaviour ----

  // The seed of the transform's random numbers. Default: 0.
  uint64_t seed{0};
};

// Gives the samples of `dataset` changed by `transform`, each when it is asked
// for:
//
//   MapDataset train(files, Compose(RandomResizedCrop(224), ToFloat()),
//                    {.seed = 1});
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     train.set_epoch(epoch);
//     for (auto& batch : loader) { ... }
//   }
//
// `transform` is called as const and, if the loader has several workers, by
// several threads at once. It takes the sample, or, if the sample is a
// torch::data::Example with a tensor, the tensor alone; the target then stays
// as it is. (A generic lambda is given the sample.) Its second parameter may be
// a SampleRandom&; all that is random must be drawn from it.
//
// Random numbers depend on the seed, the epoch and the sample's number in this
// dataset, and on nothing else. MapDatasets on top of each other draw different
// numbers, even with the same seed. The epoch is 0 until set_epoch() is called
// on the outermost dataset, which tells all below: without that call every
// epoch augments a sample in the same way.
//
// `dataset` is copied (lockstep/data/dataset.h).
//
// Threads: several may call get() and get_batch(), as far as `dataset` and
// `transform` allow it. set_epoch() must not run beside them: call it between
// two loops.
template <class D, class F>
class MapDataset {
  static_assert(internal::HasSamples<D>,
                "lockstep::MapDataset needs single samples: give the dataset a "
                "function get(size_t), or use lockstep::BatchMapDataset");

 public:
  MapDataset(D dataset, F transform, MapOptions options = {})
      : dataset_(std::move(dataset)),
        transform_(std::move(transform)),
        options_(options) {}

  auto get(size_t index) const {
    SampleRandom random(options_.seed, epoch_, index,
                        dataset_.random_streams());
    return internal::apply_transform(transform_, dataset_.get(index), random);
  }

  // Returns a std::vector of samples. They are fetched one by one, so that few
  // of them are in memory before they are changed.
  auto get_batch(c10::ArrayRef<size_t> indices) const {
    std::vector<decltype(get(size_t{}))> batch;
    batch.reserve(indices.size());
    for (const size_t index : indices) batch.push_back(get(index));
    return batch;
  }

  size_t size() const { return dataset_.size(); }

  // Begins another sequence of random numbers, here and in the datasets below.
  void set_epoch(int64_t epoch) {
    epoch_ = epoch;
    dataset_.set_epoch(epoch);
  }
  int64_t epoch() const { return epoch_; }

  // For MapDatasets on top of this one.
  uint64_t random_streams() const { return dataset_.random_streams() + 1; }

 private:
  internal::HeldDataset<D> dataset_;
  F transform_;
  MapOptions options_;
  int64_t epoch_ = 0;
};

}  // namespace lockstep
