#include "lockstep/data/sample_random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <stdexcept>
#include <string>

#include "lockstep/state/digest.h"

namespace lockstep {
namespace {

// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators", 2014): a bijection that spreads every bit
// over all others.
uint64_t spread_bits(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator SampleSeed::generator() const {
  return at::make_generator<at::CPUGeneratorImpl>(value);
}

SampleSeed SampleSeed::derived() const { return {spread_bits(value)}; }

namespace internal {

SampleSeed sample_seed(int64_t seed, int64_t epoch, int64_t place,
                       size_t index) {
  uint64_t value = spread_bits(static_cast<uint64_t>(seed));
  value = spread_bits(value + static_cast<uint64_t>(epoch));
  value = spread_bits(value + static_cast<uint64_t>(place));
  return {spread_bits(value + index)};
}

SampleSeed seed_of_index(size_t index) {
  return sample_seed(0, 0, static_cast<int64_t>(index), index);
}

std::vector<SampleSeed> seeds_of_indices(c10::ArrayRef<size_t> indices) {
  std::vector<SampleSeed> seeds;
  seeds.reserve(indices.size());
  for (const size_t index : indices) seeds.push_back(seed_of_index(index));
  return seeds;
}

SampleSeed seed_of_batch(c10::ArrayRef<SampleSeed> seeds) {
  Digest digest;
  for (const SampleSeed seed : seeds) digest.add(seed.value);
  return {digest.value()};
}

}  // namespace internal

int64_t SampleRandom::integer(int64_t low, int64_t high) {
  if (low >= high) {
    throw std::invalid_argument("SampleRandom: integer(" + std::to_string(low) +
                                ", " + std::to_string(high) +
                                ") has no number to choose; the second must "
                                "be larger than the first");
  }
  const uint64_t count =
      static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  // Numbers from the incomplete last part of [0, 2^64) would make some results
  // likelier.
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  const uint64_t rest = (most % count + 1) % count;
  uint64_t drawn = bits();
  while (drawn > most - rest) drawn = bits();
  return static_cast<int64_t>(static_cast<uint64_t>(low) + drawn % count);
}

at::Generator SampleRandom::generator() {
  return at::make_generator<at::CPUGeneratorImpl>(bits());
}

}  // namespace lockstep
