#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::internal {

// Throws c10::IndexError that names `dataset` unless `index` < `size`.
void check_index(size_t index, size_t size, const char* dataset);

[[noreturn]] void throw_without_size();
[[noreturn]] void throw_null_dataset();

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

template <class D>
struct PointeeOf {
  using Type = D;
  static D& of(D& dataset) { return dataset; }
};
template <class D>
struct PointeeOf<std::shared_ptr<D>> {
  using Type = D;
  static D& of(const std::shared_ptr<D>& dataset) { return *dataset; }
};

template <class D>
concept HasGet = requires(D& dataset, size_t index) { dataset.get(index); };
template <class D>
concept HasGetBatch = requires(D& dataset, c10::ArrayRef<size_t> indices) {
  dataset.get_batch(indices);
};

// Whether get_batch() returns the samples one by one, and not a whole.
template <class D>
concept HasBatchOfSamples = HasGetBatch<D> && requires(D& dataset) {
  requires IsVector<std::remove_cvref_t<decltype(dataset.get_batch(
      c10::ArrayRef<size_t>()))>>::value;
};

// Whether single samples can be had of the dataset, or of one of the type that
// a std::shared_ptr points to.
template <class D>
concept HasSamples = HasGet<typename PointeeOf<D>::Type> ||
                     HasBatchOfSamples<typename PointeeOf<D>::Type>;

// A dataset of any kind (lockstep/data/dataset.h) in one form: get_batch() is
// const and always there, and so is get() if the dataset HasSamples.
//
// The functions of LibTorch's datasets are not const, so the dataset is mutable
// here. What makes concurrent calls safe is the dataset's own promise, as for
// the workers of a DataLoader.
template <class D>
class HeldDataset {
 public:
  using Held = typename PointeeOf<D>::Type;
  static_assert(
      HasGet<Held> || HasGetBatch<Held>,
      "a dataset needs get(size_t) or "
      "get_batch(c10::ArrayRef<size_t>); see lockstep/data/dataset.h");

  explicit HeldDataset(D dataset) : dataset_(std::move(dataset)) {
    if constexpr (!std::is_same_v<D, Held>) {
      if (!dataset_) throw_null_dataset();
    }
  }

  size_t size() const {
    const std::optional<size_t> size = held().size();
    if (!size) throw_without_size();
    return *size;
  }

  auto get(size_t index) const
    requires HasSamples<D>
  {
    if constexpr (HasGet<Held>) {
      return held().get(index);
    } else {
      return std::move(held().get_batch(c10::ArrayRef<size_t>(index)).front());
    }
  }

  auto get_batch(c10::ArrayRef<size_t> indices) const {
    if constexpr (HasGetBatch<Held>) {
      return held().get_batch(indices);
    } else {
      std::vector<decltype(get(size_t{}))> batch;
      batch.reserve(indices.size());
      for (const size_t index : indices) batch.push_back(get(index));
      return batch;
    }
  }

  // Passes the epoch on if the dataset has use for it.
  void set_epoch(int64_t epoch) {
    if constexpr (requires { held().set_epoch(epoch); }) {
      held().set_epoch(epoch);
    } else {
      static_assert(
          !requires(std::remove_const_t<Held>& dataset) {
            dataset.set_epoch(epoch);
          },
          "this dataset needs to know the epoch, but it is const: give a "
          "std::shared_ptr to one that is not const");
    }
  }

  // Returns how many independent streams of random numbers the dataset takes
  // from each seed (MapDataset).
  uint64_t random_streams() const {
    if constexpr (requires { held().random_streams(); }) {
      return held().random_streams();
    } else {
      return 0;
    }
  }

 private:
  Held& held() const { return PointeeOf<D>::of(dataset_); }

  mutable D dataset_;
};

// What a dataset gives for one number, and for a list of them.
template <class D>
using SampleOf =
    std::remove_cvref_t<decltype(std::declval<const HeldDataset<D>&>().get(
        size_t{}))>;
template <class D>
using BatchOf = std::remove_cvref_t<
    decltype(std::declval<const HeldDataset<D>&>().get_batch(
        std::declval<c10::ArrayRef<size_t>>()))>;

// The base of a dataset that gives the samples of another one in another order.
// `Self` has `size_t place(size_t index) const`, which throws c10::IndexError
// if `index` is outside, and returns a number of the other dataset. Samples are
// fetched one by one or in batches, as the other dataset does it.
template <class Self, class D>
class Reordered {
 public:
  auto get(size_t index) const
    requires HasSamples<D>
  {
    return dataset_.get(self().place(index));
  }

  auto get_batch(c10::ArrayRef<size_t> indices) const {
    std::vector<size_t> places;
    places.reserve(indices.size());
    for (const size_t index : indices) places.push_back(self().place(index));
    return dataset_.get_batch(places);
  }

  // Tells the dataset below which epoch begins, if it has use for that
  // (MapDataset). Do not call it while a loop runs.
  void set_epoch(int64_t epoch) { dataset_.set_epoch(epoch); }

  uint64_t random_streams() const { return dataset_.random_streams(); }

 protected:
  explicit Reordered(D dataset) : dataset_(std::move(dataset)) {}
  const HeldDataset<D>& dataset() const { return dataset_; }

 private:
  const Self& self() const { return static_cast<const Self&>(*this); }

  HeldDataset<D> dataset_;
};

}  // namespace lockstep::internal
