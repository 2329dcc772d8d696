#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/datasets/subset.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {

// Splits a dataset at random into parts without common samples, as
// torch.utils.data.random_split does, and gives the same samples as Python for
// `generator=torch.Generator().manual_seed(seed)`:
//
//   auto parts = random_split(dataset, {0.9, 0.1}, 42);
//   Subset train = parts[0], test = parts[1];
//
// `lengths` are numbers of samples, which must add up to the dataset's size, or
// fractions that add up to 1. Each part gets floor(size * fraction) samples;
// the first parts get one more each until all samples are used.
//
// All ranks must give the same seed. `dataset` is copied for each part
// (lockstep/data/dataset.h). Throws std::invalid_argument if the lengths are
// not as said.
template <class D, class Number>
std::vector<Subset<D>> random_split(const D& dataset,
                                    const std::vector<Number>& lengths,
                                    uint64_t seed) {
  const std::vector<double> given(lengths.begin(), lengths.end());
  std::vector<Subset<D>> parts;
  for (auto& indices : internal::split_at_random(
           internal::HeldDataset<D>(dataset).size(), given, seed)) {
    parts.emplace_back(dataset, std::move(indices));
  }
  return parts;
}

template <class D, class Number>
std::vector<Subset<D>> random_split(const D& dataset,
                                    std::initializer_list<Number> lengths,
                                    uint64_t seed) {
  return random_split(dataset, std::vector<Number>(lengths), seed);
}

}  // namespace lockstep
