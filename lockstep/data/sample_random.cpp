#include "lockstep/data/sample_random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <stdexcept>
#include <string>

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

uint64_t key(uint64_t seed, int64_t epoch, uint64_t stream) {
  return spread_bits(
      spread_bits(spread_bits(seed) + static_cast<uint64_t>(epoch)) + stream);
}

}  // namespace

SampleRandom::SampleRandom(uint64_t seed, int64_t epoch, uint64_t index,
                           uint64_t stream)
    : engine_(key(seed, epoch, stream), index) {}

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
