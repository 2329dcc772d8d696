#pragma once

#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>

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
};

namespace internal {

SampleSeed sample_seed(int64_t seed, int64_t epoch, int64_t place,
                       size_t index);

}  // namespace internal
}  // namespace lockstep
