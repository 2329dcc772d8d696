#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <vector>

namespace lockstep {

// The base of a dataset of your own that has samples by number, as
// torch.utils.data.Dataset:
//
//   struct Squares : lockstep::Dataset<> {
//     torch::data::Example<> get(size_t index) const override {
//       auto value = torch::tensor(static_cast<int64_t>(index));
//       return {value, value * value};
//     }
//     size_t size() const override { return 100; }
//   };
//
// DataLoader makes a batch of samples as default_collate() does
// (lockstep/data/collate.h): those of a torch::data::Example of tensors are
// stacked.
//
// Threads: workers of a DataLoader call get() and get_batch() at the same time,
// so both must allow that; that they are const helps the compiler to see it.
//
// Not only classes that derive from this one are datasets. The loader and the
// classes that change a dataset (MapDataset, Subset, TakeDataset,
// ConcatDataset, ShuffledDataset, RepeatedDataset, random_split) take any type
// D with
//
// - `size()`, which returns a number (or an optional with one), and
// - `get(size_t)`, or `get_batch(c10::ArrayRef<size_t>)`, or both, or such
//   functions that also take seeds (lockstep/data/sample_random.h): a dataset
//   of LibTorch, a TensorDataset, a class without a base.
//
// The loader refers to its dataset. The classes that change one keep a *copy*,
// and also take a std::shared_ptr<D>. The datasets of this library share their
// files and tensors between copies, so a copy costs next to nothing; give a
// std::shared_ptr to a class of your own that is expensive to copy or cannot be
// copied.
//
// The datasets of this library throw c10::IndexError for a number that is not
// in [0, size()).
template <class Sample = torch::data::Example<>>
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Returns the sample with this number. Requires `index` < size().
  virtual Sample get(size_t index) const = 0;

  virtual size_t size() const = 0;

  // Returns the samples with these numbers, in this order. Override it if many
  // samples at once are cheaper than one after another.
  virtual std::vector<Sample> get_batch(c10::ArrayRef<size_t> indices) const {
    std::vector<Sample> batch;
    batch.reserve(indices.size());
    for (const size_t index : indices) batch.push_back(get(index));
    return batch;
  }

 protected:
  Dataset() = default;
  Dataset(const Dataset&) = default;
  Dataset(Dataset&&) = default;
  Dataset& operator=(const Dataset&) = default;
  Dataset& operator=(Dataset&&) = default;
};

}  // namespace lockstep
