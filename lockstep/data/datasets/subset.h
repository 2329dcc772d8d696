#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/held_dataset.h"

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

}  // namespace lockstep
