#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/selection.h"

namespace lockstep {

// Gives the samples of `dataset` with the numbers `indices`, in that order and
// as often as they occur: torch.utils.data.Subset. `dataset` is copied
// (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class Subset : public internal::SelectedSamples<D> {
 public:
  // Throws std::invalid_argument if an index is outside of the dataset.
  Subset(D dataset, std::vector<size_t> indices)
      : Subset::SelectedSamples(std::move(dataset), [&](size_t size) {
          return internal::Selection::subset(std::move(indices), size);
        }) {}

  const std::vector<size_t>& indices() const {
    return this->selection().indices();
  }
};

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

// Gives `count` samples of `dataset`, from number `first` on. `dataset` is
// copied (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class TakeDataset : public internal::SelectedSamples<D> {
 public:
  // Throws std::invalid_argument if the dataset has fewer samples.
  TakeDataset(D dataset, size_t count, size_t first = 0)
      : TakeDataset::SelectedSamples(std::move(dataset), [&](size_t size) {
          return internal::Selection::taken(count, first, size);
        }) {}
};

// Gives all samples of `dataset` `times` times, one pass after another: for a
// small dataset beside a large one in a ConcatDataset, or for long epochs. A
// MapDataset on top of it or below augments each repetition in another way.
// `dataset` is copied (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class RepeatedDataset : public internal::SelectedSamples<D> {
 public:
  RepeatedDataset(D dataset, size_t times)
      : RepeatedDataset::SelectedSamples(std::move(dataset), [&](size_t size) {
          return internal::Selection::repeated(times, size);
        }) {}
};

// Gives the samples of `dataset` in a random order that stays the same: that of
// Python's `torch.randperm(size,
// generator=torch.Generator().manual_seed(seed))`. Use it to mix what is sorted
// (a folder of images by class) before a part is taken; for another order in
// each epoch use a DistributedSampler.
//
// The order takes 8 bytes for each sample. `dataset` is copied
// (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class ShuffledDataset : public internal::SelectedSamples<D> {
 public:
  ShuffledDataset(D dataset, uint64_t seed)
      : ShuffledDataset::SelectedSamples(std::move(dataset), [&](size_t size) {
          return internal::Selection::shuffled(seed, size);
        }) {}
};

// Gives the samples of several datasets, one dataset after another:
// torch.utils.data.ConcatDataset.
//
//   ConcatDataset all(first, second);           // of any types
//   ConcatDataset shards(std::move(datasets));  // a std::vector
//
// Datasets of different types must have samples of one type; they become
// AnyDatasets. Samples are fetched one by one, with seeds if the datasets take
// them. The datasets are copied (lockstep/data/dataset.h). Threads as in the
// datasets.
template <class D>
class ConcatDataset {
 public:
  // Throws std::invalid_argument if there is no dataset.
  explicit ConcatDataset(std::vector<D> datasets) {
    if (datasets.empty()) internal::throw_nothing_to_join();
    for (D& dataset : datasets) joined_.add(std::move(dataset));
  }

  template <class First, class Second, class... More>
  ConcatDataset(First first, Second second, More... more) {
    joined_.add(D(std::move(first)));
    joined_.add(D(std::move(second)));
    (joined_.add(D(std::move(more))), ...);
  }

  auto get(size_t index) const { return joined_.get(index); }
  auto get(size_t index, SampleSeed seed) const
    requires internal::TakesSeeds<D>
  {
    return joined_.get(index, seed);
  }

  size_t size() const { return joined_.size(); }

 private:
  internal::JoinedDatasets<D> joined_;
};

template <class D>
ConcatDataset(std::vector<D>) -> ConcatDataset<D>;
template <class First, class... More>
  requires(sizeof...(More) > 0)
ConcatDataset(First, More...)
    -> ConcatDataset<
        std::conditional_t<(std::is_same_v<First, More> && ...), First,
                           AnyDataset<internal::SampleOf<First>>>>;

}  // namespace lockstep
