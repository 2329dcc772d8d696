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

#include "lockstep/data/dataset_access.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sampler.h"

namespace lockstep::internal {

// Throws c10::IndexError that names `dataset` unless `index` < `size`.
void check_index(size_t index, size_t size, const char* dataset);

// Returns which part of a dataset has sample `index`, and the sample's number
// there. `ends` has the number of samples up to the end of each part. Throws as
// check_index() does.
std::pair<size_t, size_t> place_in_parts(size_t index,
                                         const std::vector<size_t>& ends,
                                         const char* dataset);

[[noreturn]] void throw_null_dataset();

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

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};
template <class T>
concept VectorOfSamples = IsVector<std::remove_cvref_t<T>>::value;

// Whether get_batch() returns the samples one by one, and not a whole.
template <class D>
concept GivesListsOfSamples =
    requires(D& dataset, c10::ArrayRef<size_t> indices) {
      { dataset.get_batch(indices) } -> VectorOfSamples;
    };
template <class D>
concept GivesSeededListsOfSamples =
    requires(D& dataset, c10::ArrayRef<size_t> indices,
             c10::ArrayRef<SampleSeed> seeds) {
      { dataset.get_batch(indices, seeds) } -> VectorOfSamples;
    };

// Whether single samples can be had of the dataset, or of one of the type that
// a std::shared_ptr points to; and whether that takes seeds.
template <class D, class Held = typename PointeeOf<D>::Type>
concept HasSamples =
    GivesSamples<Held> || GivesSeededSamples<Held> ||
    GivesListsOfSamples<Held> || GivesSeededListsOfSamples<Held>;
template <class D>
concept TakesSeeds = kTakesSeeds<typename PointeeOf<D>::Type>;

// A dataset of any kind (lockstep/data/dataset.h) in one form: get_batch() is
// const and always there, and so is get() if the dataset HasSamples. Both may
// be called with seeds, which are passed on if the dataset takes them, or
// without. A dataset that needs seeds then has those of seed_of_index().
//
// The functions of LibTorch's datasets are not const, so the dataset is mutable
// here. What makes concurrent calls safe is the dataset's own promise, as for
// the workers of a DataLoader.
template <class D>
class HeldDataset {
 public:
  using Held = typename PointeeOf<D>::Type;
  static_assert(
      GivesSamples<Held> || GivesSeededSamples<Held> || GivesBatches<Held> ||
          GivesSeededBatches<Held>,
      "a dataset needs get(size_t) or "
      "get_batch(c10::ArrayRef<size_t>); see lockstep/data/dataset.h");

  explicit HeldDataset(D dataset) : dataset_(std::move(dataset)) {
    if constexpr (!std::is_same_v<D, Held>) {
      if (!dataset_) throw_null_dataset();
    }
  }

  size_t size() const { return static_cast<size_t>(DatasetSize(held())); }

  auto get(size_t index) const
    requires HasSamples<D>
  {
    if constexpr (GivesSamples<Held>) {
      return held().get(index);
    } else if constexpr (GivesListsOfSamples<Held>) {
      return std::move(held().get_batch(c10::ArrayRef<size_t>(index)).front());
    } else {
      return get(index, seed_of_index(index));
    }
  }

  auto get(size_t index, SampleSeed seed) const
    requires HasSamples<D>
  {
    if constexpr (GivesSeededSamples<Held>) {
      return held().get(index, seed);
    } else if constexpr (GivesSeededListsOfSamples<Held>) {
      return std::move(held()
                           .get_batch(c10::ArrayRef<size_t>(index),
                                      c10::ArrayRef<SampleSeed>(seed))
                           .front());
    } else {
      return get(index);
    }
  }

  auto get_batch(c10::ArrayRef<size_t> indices) const {
    if constexpr (GivesBatches<Held>) {
      return held().get_batch(indices);
    } else if constexpr (GivesSeededBatches<Held>) {
      return held().get_batch(indices, seeds_of_indices(indices));
    } else {
      std::vector<decltype(get(size_t{}))> batch;
      batch.reserve(indices.size());
      for (const size_t index : indices) batch.push_back(get(index));
      return batch;
    }
  }

  // Requires one seed for each index; if the dataset takes none, `seeds` is not
  // read.
  auto get_batch(c10::ArrayRef<size_t> indices,
                 c10::ArrayRef<SampleSeed> seeds) const {
    if constexpr (GivesSeededBatches<Held>) {
      return held().get_batch(indices, seeds);
    } else if constexpr (GivesSeededSamples<Held>) {
      std::vector<decltype(get(size_t{}, SampleSeed()))> batch;
      batch.reserve(indices.size());
      for (size_t i = 0; i < indices.size(); ++i) {
        batch.push_back(get(indices[i], seeds[i]));
      }
      return batch;
    } else {
      return get_batch(indices);
    }
  }

 private:
  Held& held() const { return PointeeOf<D>::of(dataset_); }

  mutable D dataset_;
};

// The sample that a dataset gives for one number.
template <class D>
using SampleOf =
    std::remove_cvref_t<decltype(std::declval<const HeldDataset<D>&>().get(
        size_t{}, SampleSeed()))>;

}  // namespace lockstep::internal
