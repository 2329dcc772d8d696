#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

// Where the indices of a pass lie in the global order of an epoch: index i is
// at place `first + i * stride`. The places of a sample stay the same when the
// epoch is resumed by another number of ranks.
struct PassPlaces {
  // If it is none, the loader numbers its passes, from 0 on.
  std::optional<int64_t> epoch{};
  int64_t first{0};
  int64_t stride{1};
};

// Decides which samples of a dataset this process visits, and in which order. A
// DataLoader refers to a sampler and never copies it, so that what the training
// loop tells the sampler (an epoch, a restored position) reaches the next loop.
//
// A *pass* is one loop over the loader. Not synchronised: a sampler belongs to
// the thread that runs the loop; the loader's workers never touch it.
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Starts a pass and returns the indices to visit, each in [0,
  // dataset_size()).
  virtual std::vector<size_t> begin_pass() = 0;

  // Tells the sampler that the loop has received the next `count` indices of
  // the pass. The loader calls this for every batch that it returns, with its
  // batch size (also if the last batch is shorter), and never for a batch that
  // is only prefetched.
  virtual void consumed(int64_t count) = 0;

  // Tells the sampler that the loop has received the last batch of the pass, if
  // there is any, and that the loader leaves out the indices after it
  // (drop_last). By default does nothing.
  virtual void rest_left_out() {}

  // Returns the places of the pass that began last. The loader makes the seeds
  // of samples from them (DataLoaderOptions::seed). By default place i is index
  // i of the pass, and there is no epoch, so a resumed run begins with the
  // seeds of the first pass again.
  virtual PassPlaces places() const { return {}; }

  // Returns the number of indices in a whole pass (one that was not resumed).
  virtual int64_t size() const = 0;

  // Returns the size of the dataset that the indices refer to.
  virtual int64_t dataset_size() const = 0;

  // Returns whether the dataset may be larger than dataset_size(), because the
  // sampler selects some of its samples. Otherwise a loader refuses it: the
  // samples at the end would never be visited. By default false.
  virtual bool takes_larger_dataset() const { return false; }
};

// A number of samples, or a dataset (lockstep/data/dataset.h) that has as many.
class DatasetSize {
 public:
  DatasetSize(int64_t size) : size_(size) {}
  // Throws std::invalid_argument if size() is an optional without a number.
  template <class D>
    requires requires(const D& dataset) {
      { dataset.size() } -> std::convertible_to<std::optional<size_t>>;
    }
  DatasetSize(const D& dataset) : size_(number_of(dataset.size())) {}

  operator int64_t() const { return size_; }

 private:
  static int64_t number_of(std::optional<size_t> size);

  int64_t size_;
};

}  // namespace lockstep
