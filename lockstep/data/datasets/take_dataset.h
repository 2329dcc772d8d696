#pragma once

#include <cstddef>
#include <utility>

#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {

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

}  // namespace lockstep
