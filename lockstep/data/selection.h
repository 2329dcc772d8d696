#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"

// The common part of the datasets that select samples of others
// (lockstep/data/datasets/selected_samples.h).
namespace lockstep::internal {

// The numbers of the selected samples, in their order. The functions that make
// one take the size of the dataset last, and throw std::invalid_argument that
// names the class if the arguments do not fit it.
class Selection {
 public:
  static Selection subset(std::vector<size_t> indices, size_t size);
  static Selection taken(size_t count, size_t first, size_t size);
  static Selection repeated(size_t times, size_t size);
  static Selection shuffled(uint64_t seed, size_t size);

  size_t size() const { return size_; }
  const std::vector<size_t>& indices() const { return indices_; }
  // Throws c10::IndexError if `place` is outside.
  size_t at(size_t place) const {
    check_index(place, size_, class_);
    return indices_.empty() ? first_ + place % period_ : indices_[place];
  }

 private:
  Selection(const char* name, size_t size) : class_(name), size_(size) {}

  const char* class_;
  size_t size_;
  // If they are empty, the numbers are first_, first_ + 1, ... with this
  // period.
  std::vector<size_t> indices_{};
  size_t first_ = 0;
  size_t period_ = 1;
};

// Returns the numbers of the samples in each part (random_split).
std::vector<std::vector<size_t>> split_at_random(
    size_t size, const std::vector<double>& lengths, uint64_t seed);

// The base of a dataset with a selection of another one's samples. They are
// fetched one by one or in batches, and with seeds or without, as the other
// dataset does it.
template <class D>
class SelectedSamples {
 public:
  auto get(size_t index) const
    requires HasSamples<D>
  {
    return dataset_.get(selection_.at(index));
  }
  auto get(size_t index, SampleSeed seed) const
    requires(HasSamples<D> && TakesSeeds<D>)
  {
    return dataset_.get(selection_.at(index), seed);
  }

  auto get_batch(c10::ArrayRef<size_t> indices) const {
    return dataset_.get_batch(places(indices));
  }
  auto get_batch(c10::ArrayRef<size_t> indices,
                 c10::ArrayRef<SampleSeed> seeds) const
    requires TakesSeeds<D>
  {
    return dataset_.get_batch(places(indices), seeds);
  }

  size_t size() const { return selection_.size(); }

 protected:
  // `select` returns the selection of a dataset with the size that it is given.
  template <class Select>
  SelectedSamples(D dataset, const Select& select)
      : dataset_(std::move(dataset)), selection_(select(dataset_.size())) {}
  const Selection& selection() const { return selection_; }

 private:
  std::vector<size_t> places(c10::ArrayRef<size_t> indices) const {
    std::vector<size_t> places;
    places.reserve(indices.size());
    for (const size_t index : indices) places.push_back(selection_.at(index));
    return places;
  }

  HeldDataset<D> dataset_;
  Selection selection_;
};

// Datasets of one type, one after another.
template <class D>
class JoinedDatasets {
  static_assert(HasSamples<D>,
                "lockstep::ConcatDataset needs single samples: give the "
                "datasets a function get(size_t)");

 public:
  void add(D dataset) {
    const auto& added = datasets_.emplace_back(std::move(dataset));
    ends_.push_back((ends_.empty() ? 0 : ends_.back()) + added.size());
  }

  auto get(size_t index) const {
    const auto [part, place] = place_in_parts(index, ends_, "ConcatDataset");
    return datasets_[part].get(place);
  }
  auto get(size_t index, SampleSeed seed) const {
    const auto [part, place] = place_in_parts(index, ends_, "ConcatDataset");
    return datasets_[part].get(place, seed);
  }
  size_t size() const { return ends_.empty() ? 0 : ends_.back(); }

 private:
  std::vector<HeldDataset<D>> datasets_;
  std::vector<size_t> ends_;  // of each dataset, in this one
};

[[noreturn]] void throw_nothing_to_join();

}  // namespace lockstep::internal
