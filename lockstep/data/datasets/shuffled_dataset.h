#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/data/datasets/index_lists.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {

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

}  // namespace lockstep
