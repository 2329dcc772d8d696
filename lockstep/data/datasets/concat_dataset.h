#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_seed.h"

namespace lockstep {

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
