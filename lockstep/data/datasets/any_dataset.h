#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/held_dataset.h"

namespace lockstep {

// A dataset of any type whose samples are `Sample`, for programs that choose it
// while they run:
//
//   AnyDataset<> data = use_cifar ? AnyDataset<>(Cifar10Dataset(folder))
//                                 : AnyDataset<>(ImageFolder(folder));
//
// Copies share the dataset that was given, and set_epoch() on one reaches all
// of them. Samples are fetched one by one. Threads as in that dataset.
template <class Sample = torch::data::Example<>>
class AnyDataset {
 public:
  // Keeps a copy of `dataset` (lockstep/data/dataset.h).
  template <class D>
    requires(!std::is_same_v<std::remove_cvref_t<D>, AnyDataset> &&
             std::is_convertible_v<internal::SampleOf<D>, Sample>)
  explicit AnyDataset(D dataset)
      : dataset_(std::make_shared<Of<D>>(std::move(dataset))) {}

  Sample get(size_t index) const { return dataset_->get(index); }
  std::vector<Sample> get_batch(c10::ArrayRef<size_t> indices) const {
    std::vector<Sample> batch;
    batch.reserve(indices.size());
    for (const size_t index : indices) batch.push_back(get(index));
    return batch;
  }
  size_t size() const { return dataset_->size(); }
  void set_epoch(int64_t epoch) { dataset_->set_epoch(epoch); }
  uint64_t random_streams() const { return dataset_->random_streams(); }

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual Sample get(size_t index) const = 0;
    virtual size_t size() const = 0;
    virtual void set_epoch(int64_t epoch) = 0;
    virtual uint64_t random_streams() const = 0;
  };
  template <class D>
  struct Of : Interface {
    explicit Of(D given) : dataset(std::move(given)) {}
    Sample get(size_t index) const override { return dataset.get(index); }
    size_t size() const override { return dataset.size(); }
    void set_epoch(int64_t epoch) override { dataset.set_epoch(epoch); }
    uint64_t random_streams() const override {
      return dataset.random_streams();
    }
    internal::HeldDataset<D> dataset;
  };

  std::shared_ptr<Interface> dataset_;
};

}  // namespace lockstep
