#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"

namespace lockstep::internal {

// Computations of the datasets that select samples of others; errors are
// std::invalid_argument with the dataset's name.

// Throws unless all of `indices` are less than `size`.
void check_subset(const std::vector<size_t>& indices, size_t size);

// Throws unless [first, first + count) lies in [0, size).
void check_taken(size_t count, size_t first, size_t size);

// Returns once * times; throws if that overflows.
size_t repeated_size(size_t once, size_t times);

// Throws if there is no dataset. `ends` are the running sums of the sizes.
void check_concat(const std::vector<size_t>& ends);

// Returns torch.randperm(size) of a CPU generator with this seed.
std::vector<size_t> random_order(size_t size, uint64_t seed);

// Returns the numbers of the samples in each part (random_split).
std::vector<std::vector<size_t>> split_at_random(
    size_t size, const std::vector<double>& lengths, uint64_t seed);

}  // namespace lockstep::internal

namespace lockstep {

// Gives the samples of `dataset` with the numbers `indices`, in that order and
// as often as they occur: torch.utils.data.Subset. `dataset` is copied
// (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class Subset : public internal::Reordered<Subset<D>, D> {
 public:
  // Throws std::invalid_argument if an index is outside of the dataset.
  Subset(D dataset, std::vector<size_t> indices)
      : internal::Reordered<Subset<D>, D>(std::move(dataset)),
        indices_(std::move(indices)) {
    internal::check_subset(indices_, this->dataset().size());
  }

  size_t size() const { return indices_.size(); }
  const std::vector<size_t>& indices() const { return indices_; }

 private:
  friend internal::Reordered<Subset<D>, D>;
  size_t place(size_t index) const {
    internal::check_index(index, indices_.size(), "Subset");
    return indices_[index];
  }

  std::vector<size_t> indices_;
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
class TakeDataset : public internal::Reordered<TakeDataset<D>, D> {
 public:
  // Throws std::invalid_argument if the dataset has fewer samples.
  TakeDataset(D dataset, size_t count, size_t first = 0)
      : internal::Reordered<TakeDataset<D>, D>(std::move(dataset)),
        count_(count),
        first_(first) {
    internal::check_taken(count, first, this->dataset().size());
  }

  size_t size() const { return count_; }

 private:
  friend internal::Reordered<TakeDataset<D>, D>;
  size_t place(size_t index) const {
    internal::check_index(index, count_, "TakeDataset");
    return first_ + index;
  }

  size_t count_;
  size_t first_;
};

// Gives all samples of `dataset` `times` times, one pass after another: for a
// small dataset beside a large one in a ConcatDataset, or for long epochs. A
// MapDataset on top of it or below augments each repetition in another way.
// `dataset` is copied (lockstep/data/dataset.h). Threads as in `dataset`.
template <class D>
class RepeatedDataset : public internal::Reordered<RepeatedDataset<D>, D> {
 public:
  RepeatedDataset(D dataset, size_t times)
      : internal::Reordered<RepeatedDataset<D>, D>(std::move(dataset)),
        once_(this->dataset().size()),
        size_(internal::repeated_size(once_, times)) {}

  size_t size() const { return size_; }

 private:
  friend internal::Reordered<RepeatedDataset<D>, D>;
  size_t place(size_t index) const {
    internal::check_index(index, size_, "RepeatedDataset");
    return index % once_;
  }

  size_t once_;
  size_t size_;
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
class ShuffledDataset : public internal::Reordered<ShuffledDataset<D>, D> {
 public:
  ShuffledDataset(D dataset, uint64_t seed)
      : internal::Reordered<ShuffledDataset<D>, D>(std::move(dataset)),
        order_(internal::random_order(this->dataset().size(), seed)) {}

  size_t size() const { return order_.size(); }

 private:
  friend internal::Reordered<ShuffledDataset<D>, D>;
  size_t place(size_t index) const {
    internal::check_index(index, order_.size(), "ShuffledDataset");
    return order_[index];
  }

  std::vector<size_t> order_;
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
  static_assert(internal::HasSamples<D>,
                "lockstep::ConcatDataset needs single samples: give the "
                "datasets a function get(size_t)");

 public:
  // Throws std::invalid_argument if there is no dataset.
  explicit ConcatDataset(std::vector<D> datasets) {
    datasets_.reserve(datasets.size());
    for (D& dataset : datasets) add(std::move(dataset));
    internal::check_concat(ends_);
  }

  template <class First, class Second, class... More>
  ConcatDataset(First first, Second second, More... more) {
    datasets_.reserve(2 + sizeof...(More));
    add(D(std::move(first)));
    add(D(std::move(second)));
    (add(D(std::move(more))), ...);
    internal::check_concat(ends_);
  }

  auto get(size_t index) const {
    const auto [part, place] = place_of(index);
    return datasets_[part].get(place);
  }
  auto get(size_t index, SampleSeed seed) const
    requires internal::TakesSeeds<D>
  {
    const auto [part, place] = place_of(index);
    return datasets_[part].get(place, seed);
  }

  size_t size() const { return ends_.back(); }

 private:
  // Returns which dataset has the sample, and the sample's number there.
  std::pair<size_t, size_t> place_of(size_t index) const {
    internal::check_index(index, size(), "ConcatDataset");
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), index);
    const auto part = static_cast<size_t>(end - ends_.begin());
    return {part, part == 0 ? index : index - ends_[part - 1]};
  }

  void add(D dataset) {
    const auto& added = datasets_.emplace_back(std::move(dataset));
    ends_.push_back((ends_.empty() ? 0 : ends_.back()) + added.size());
  }

  std::vector<internal::HeldDataset<D>> datasets_;
  std::vector<size_t> ends_;  // of each dataset, in this one
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
