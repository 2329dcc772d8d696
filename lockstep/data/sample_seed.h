#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// The seed of one sample in one epoch, for datasets that augment at random. A
// DataLoader gives it to a dataset that has
//
//   Sample get(size_t index, lockstep::SampleSeed seed);
//
// or `get_batch(c10::ArrayRef<size_t>, c10::ArrayRef<lockstep::SampleSeed>)`.
// It depends on DataLoaderOptions::seed, the epoch, the sample's place in the
// global order of the epoch, and the sample's index. It does not depend on the
// workers, the batch size, the number of ranks or the place where a run was
// resumed. A sample that is drawn twice in an epoch has two seeds.
struct SampleSeed {
  uint64_t value{0};

  // Returns a generator for LibTorch's functions on the CPU, which is at the
  // beginning of this seed's numbers. It costs some microseconds.
  at::Generator generator() const;

  // Returns a seed that depends on this one only and has other numbers. A
  // dataset that draws from a seed gives the derived one to the dataset below.
  SampleSeed derived() const;
};

namespace internal {

SampleSeed sample_seed(int64_t seed, int64_t epoch, int64_t place,
                       size_t index);

// Returns the seed of a sample that a program asks for without one: that of the
// sample at place `index` in epoch 0 of a loader with seed 0.
SampleSeed seed_of_index(size_t index);
std::vector<SampleSeed> seeds_of_indices(c10::ArrayRef<size_t> indices);

// Returns the seed of a batch whose samples have these seeds, in this order.
SampleSeed seed_of_batch(c10::ArrayRef<SampleSeed> seeds);

}  // namespace internal
}  // namespace lockstep
