#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <type_traits>
#include <utility>

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
