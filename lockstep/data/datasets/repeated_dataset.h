#pragma once

#include <cstddef>
#include <utility>

#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {

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

}  // namespace lockstep
