#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <limits>
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

// Random numbers for one sample in one epoch. They depend on the sample's seed
// only: not on the thread that prepares the sample, or on what was drawn for
// other samples. So a run that is resumed, or has other workers, augments every
// sample as before.
//
// The numbers are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", 2011), whose key is the seed.
// Making one costs some nanoseconds.
//
// It is a uniform random bit generator, as std::shuffle and the distributions
// of <random> take it. Not synchronised.
class SampleRandom {
 public:
  using result_type = uint32_t;

  explicit SampleRandom(SampleSeed seed) : engine_(seed.value) {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() {
    return std::numeric_limits<result_type>::max();
  }
  result_type operator()() { return engine_(); }

  uint64_t bits() {
    const uint64_t high = engine_();
    return high << 32 | engine_();
  }

  // Returns a number in [low, high), or `low` if both are equal.
  double uniform(double low = 0, double high = 1) {
    return low + (high - low) * (static_cast<double>(bits() >> 11) * 0x1p-53);
  }

  // Returns a number in [low, high); each is equally likely. Throws
  // std::invalid_argument if the range is empty.
  int64_t integer(int64_t low, int64_t high);

  // Returns true with this probability.
  bool chance(double probability) { return uniform() < probability; }

  // Returns a generator of LibTorch's for the CPU, for functions that take one
  // (torch::randn). It costs some microseconds.
  at::Generator generator();

 private:
  at::Philox4_32 engine_;
};

}  // namespace lockstep
