#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/PhiloxRNGEngine.h>

#include <cstdint>
#include <limits>

#include "lockstep/data/sample_seed.h"

namespace lockstep {

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
