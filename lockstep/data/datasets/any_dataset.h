#pragma once

#include <torch/data/example.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/data/held_dataset.h"
#include "lockstep/data/sample_random.h"

namespace lockstep {

// A dataset of any type whose samples are `Sample`, for programs that choose it
// while they run:
//
//   AnyDataset<> data = use_cifar ? AnyDataset<>(Cifar10Dataset(folder))
//                                 : AnyDataset<>(ImageFolder(folder));
//
// Copies share the dataset that was given. Samples are fetched one by one, with
// seeds if that dataset takes them. Threads as in that dataset.
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
  Sample get(size_t index, SampleSeed seed) const {
    return dataset_->get(index, seed);
  }
  size_t size() const { return dataset_->size(); }

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual Sample get(size_t index) const = 0;
    virtual Sample get(size_t index, SampleSeed seed) const = 0;
    virtual size_t size() const = 0;
  };
  template <class D>
  struct Of : Interface {
    explicit Of(D given) : dataset(std::move(given)) {}
    Sample get(size_t index) const override { return dataset.get(index); }
    Sample get(size_t index, SampleSeed seed) const override {
      return dataset.get(index, seed);
    }
    size_t size() const override { return dataset.size(); }
    internal::HeldDataset<D> dataset;
  };

  std::shared_ptr<Interface> dataset_;
};

}  // namespace lockstep
