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

// How MapDataset and BatchMapDataset call their transform
// (lockstep/data/datasets/map_dataset.h).
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

template <class D, class F>
class Mapped {
 public:
  Mapped(D dataset, F transform)
      : dataset_(std::move(dataset)), transform_(std::move(transform)) {}

  auto get(size_t index, SampleSeed seed) const {
    SampleRandom random(seed);
    return apply_transform(transform_, dataset_.get(index, seed.derived()),
                           random);
  }

  auto get_batch(c10::ArrayRef<size_t> indices,
                 c10::ArrayRef<SampleSeed> seeds) const {
    std::vector<SampleSeed> below;
    if constexpr (TakesSeeds<D>) {
      below.reserve(seeds.size());
      for (const SampleSeed seed : seeds) below.push_back(seed.derived());
    }
    auto fetched = dataset_.get_batch(indices, below);
    SampleRandom random(seed_of_batch(seeds));
    using Held = typename HeldDataset<D>::Held;
    if constexpr (kFetchesSamples<Held> ||
                  IsListOfKnownSamples<decltype(fetched)>::value) {
      return apply_transform(transform_, collate_samples(std::move(fetched)),
                             random);
    } else {
      return apply_transform(transform_, std::move(fetched), random);
    }
  }

  size_t size() const { return dataset_.size(); }

 private:
  HeldDataset<D> dataset_;
  F transform_;
};

}  // namespace lockstep::internal
