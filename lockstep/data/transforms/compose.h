#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "lockstep/data/apply_transform.h"
#include "lockstep/data/sample_random.h"

namespace lockstep {

// Several transforms as one, applied in their order, as torchvision's Compose:
//
//   MapDataset train(files, Compose(RandomResizedCrop(224),
//                                   RandomHorizontalFlip(), ToFloat()));
//
// Each is called as MapDataset calls its transform: with the sample, or with
// its data alone if it takes a tensor; with the random numbers of the sample,
// one after another, if it takes them. Several threads may call it if they may
// call each transform.
template <class... Transforms>
class Compose {
 public:
  explicit Compose(Transforms... transforms)
      : transforms_(std::move(transforms)...) {}

  template <class Sample>
  auto operator()(Sample sample, SampleRandom& random) const {
    return apply<0>(std::move(sample), random);
  }

 private:
  template <size_t I, class Sample>
  auto apply(Sample sample, SampleRandom& random) const {
    if constexpr (I == sizeof...(Transforms)) {
      return sample;
    } else {
      return apply<I + 1>(internal::apply_transform(std::get<I>(transforms_),
                                                    std::move(sample), random),
                          random);
    }
  }

  std::tuple<Transforms...> transforms_;
};

}  // namespace lockstep
