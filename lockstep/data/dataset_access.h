#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/collate.h"
#include "lockstep/data/sample_random.h"

namespace lockstep::internal {

// How a DataLoader asks a dataset for samples, and makes a batch of them.

template <class D>
concept GivesSamples =
    requires(D& dataset, size_t index) { dataset.get(index); };
template <class D>
concept GivesSeededSamples = requires(
    D& dataset, size_t index, SampleSeed seed) { dataset.get(index, seed); };
template <class D>
concept GivesBatches = requires(D& dataset, c10::ArrayRef<size_t> indices) {
  dataset.get_batch(indices);
};
template <class D>
concept GivesSeededBatches = requires(D& dataset, c10::ArrayRef<size_t> indices,
                                      c10::ArrayRef<SampleSeed> seeds) {
  dataset.get_batch(indices, seeds);
};

template <class Member>
struct ClassOf;
template <class Member, class Class>
struct ClassOf<Member Class::*> {
  using Type = Class;
};

// A get_batch() of an abstract class is not the dataset's own: it calls get()
// for each index, as that of torch::data::datasets::Dataset. So the loader may
// call get() itself, and then knows which sample has failed.
template <class D>
concept InheritsGetBatch = std::is_abstract_v<
    typename ClassOf<decltype(&std::remove_cv_t<D>::get_batch)>::Type>;

// Whether the loader calls get() for each sample, instead of get_batch().
template <class D>
constexpr bool kOneByOne =
    !GivesSeededBatches<D> &&
    (GivesSeededSamples<D> ||
     (GivesSamples<D> && (!GivesBatches<D> || InheritsGetBatch<D>)));

// Whether the dataset wants seeds.
template <class D>
constexpr bool kTakesSeeds = GivesSeededBatches<D> || GivesSeededSamples<D>;

// Throws a DataLoaderError that nests the exception that is being handled.
[[noreturn]] void throw_failed_sample(int64_t batch, size_t index);
[[noreturn]] void throw_failed_batch(int64_t batch, const char* what_failed,
                                     c10::ArrayRef<size_t> indices);

template <class D>
auto get_one(D& dataset, size_t index, const SampleSeed* seed) {
  if constexpr (GivesSeededSamples<D>) {
    return dataset.get(index, *seed);
  } else {
    return dataset.get(index);
  }
}

// Looks for the sample that made get_batch() throw: asks for them one by one,
// if the dataset can do that. Throws a DataLoaderError at the one that fails,
// and returns if none does.
template <class D>
void find_failed_sample(D& dataset, int64_t batch,
                        c10::ArrayRef<size_t> indices,
                        c10::ArrayRef<SampleSeed> seeds) {
  if constexpr (GivesSamples<D> || GivesSeededSamples<D>) {
    for (size_t i = 0; i < indices.size(); ++i) {
      try {
        get_one(dataset, indices[i], seeds.empty() ? nullptr : &seeds[i]);
      } catch (...) {
        throw_failed_sample(batch, indices[i]);
      }
    }
  }
}

// Returns what the dataset gives for these indices: a vector of samples, or
// what its get_batch() returns. `seeds` are as many, or none if the dataset
// does not take any. Throws DataLoaderError if the dataset throws.
template <class D>
auto fetch(D& dataset, int64_t batch, c10::ArrayRef<size_t> indices,
           c10::ArrayRef<SampleSeed> seeds) {
  static_assert(GivesSamples<D> || GivesSeededSamples<D> || GivesBatches<D> ||
                    GivesSeededBatches<D>,
                "a dataset for a lockstep::DataLoader needs get(size_t) or "
                "get_batch(c10::ArrayRef<size_t>)");
  if constexpr (kOneByOne<D>) {
    std::vector<decltype(get_one(dataset, size_t{}, nullptr))> samples;
    samples.reserve(indices.size());
    for (size_t i = 0; i < indices.size(); ++i) {
      try {
        samples.push_back(
            get_one(dataset, indices[i], seeds.empty() ? nullptr : &seeds[i]));
      } catch (...) {
        throw_failed_sample(batch, indices[i]);
      }
    }
    return samples;
  } else {
    try {
      if constexpr (GivesSeededBatches<D>) {
        return dataset.get_batch(indices, seeds);
      } else {
        return dataset.get_batch(indices);
      }
    } catch (...) {
      find_failed_sample(dataset, batch, indices, seeds);
      throw_failed_batch(batch, "the dataset failed", indices);
    }
  }
}

template <class D>
using Fetched =
    decltype(fetch(std::declval<D&>(), int64_t{}, c10::ArrayRef<size_t>(),
                   c10::ArrayRef<SampleSeed>()));

// Whether what was fetched is a list of samples: it is, unless the dataset has
// whole batches only.
template <class D>
constexpr bool kFetchesSamples = kOneByOne<D>;
template <class D>
  requires(!kOneByOne<D> && (GivesSamples<D> || GivesSeededSamples<D>))
constexpr bool kFetchesSamples<D> =
    std::is_same_v<Fetched<D>, std::vector<decltype(get_one(
                                   std::declval<D&>(), size_t{}, nullptr))>>;

template <class Batch>
struct IsListOfKnownSamples : std::false_type {};
template <class Sample>
  requires collate_lookup::Finds<Sample>
struct IsListOfKnownSamples<std::vector<Sample>> : std::true_type {};
template <class Data, class Target>
struct IsListOfKnownSamples<std::vector<torch::data::Example<Data, Target>>>
    : std::true_type {};

// Makes a batch of what was fetched. Throws DataLoaderError if that fails.
template <class D, class Collate>
auto make_batch(Fetched<D> fetched, const Collate& collate, int64_t batch,
                c10::ArrayRef<size_t> indices) {
  constexpr bool is_own = !std::is_same_v<Collate, DefaultCollate>;
  if constexpr (is_own || kFetchesSamples<D> ||
                IsListOfKnownSamples<Fetched<D>>::value) {
    try {
      if constexpr (is_own) {
        return collate(std::move(fetched));
      } else {
        return collate_samples(std::move(fetched));
      }
    } catch (...) {
      throw_failed_batch(batch, "the samples could not be collated", indices);
    }
  } else {
    return fetched;
  }
}

}  // namespace lockstep::internal
