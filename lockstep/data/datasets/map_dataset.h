#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/dataset_access.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"

namespace lockstep::internal {

template <class T>
struct ExampleTraits : std::false_type {};
template <class Target>
struct ExampleTraits<torch::data::Example<at::Tensor, Target>>
    : std::true_type {
  static constexpr bool kHasTarget = !std::is_void_v<Target>;
  template <class Data>
  using With = torch::data::Example<Data, Target>;
};

template <class F, class Value>
concept TakesWithRandom = std::is_invocable_v<const F&, Value, SampleRandom&>;
template <class F, class Value>
concept Takes =
    TakesWithRandom<F, Value> || std::is_invocable_v<const F&, Value>;

template <class F, class Value>
auto call_transform(const F& transform, Value&& value, SampleRandom& random) {
  if constexpr (TakesWithRandom<F, Value>) {
    return transform(std::forward<Value>(value), random);
  } else {
    return transform(std::forward<Value>(value));
  }
}

// Calls `transform` with the sample (or batch), and with `random` if it takes
// that. A transform that does not take the sample, but takes a tensor, gets the
// sample's data, and the target stays. An example without target converts to
// its tensor and would lose its type, so there the tensor comes first.
template <class F, class Value>
auto apply_transform(const F& transform, Value value, SampleRandom& random) {
  using Traits = ExampleTraits<Value>;
  if constexpr (!Traits::value) {
    static_assert(Takes<F, Value>,
                  "the transform does not take the sample, alone or followed "
                  "by a lockstep::SampleRandom&; its operator() must be const");
    return call_transform(transform, std::move(value), random);
  } else if constexpr (Traits::kHasTarget) {
    if constexpr (Takes<F, Value>) {
      return call_transform(transform, std::move(value), random);
    } else {
      static_assert(Takes<F, at::Tensor>,
                    "the transform takes neither the sample nor its data (a "
                    "torch::Tensor), alone or followed by a "
                    "lockstep::SampleRandom&; its operator() must be const");
      auto data = call_transform(transform, std::move(value.data), random);
      return typename Traits::template With<decltype(data)>(
          std::move(data), std::move(value.target));
    }
  } else if constexpr (Takes<F, at::Tensor>) {
    auto data = call_transform(transform, std::move(value.data), random);
    return typename Traits::template With<decltype(data)>(std::move(data));
  } else {
    return call_transform(transform, std::move(value), random);
  }
}

}  // namespace lockstep::internal

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
