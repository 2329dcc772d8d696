#include "lockstep/data/sample_seed.h"

#include <ATen/CPUGeneratorImpl.h>

namespace lockstep {

at::Generator SampleSeed::generator() const {
  return at::make_generator<at::CPUGeneratorImpl>(value);
}

namespace internal {
namespace {

// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators", OOPSLA 2014). It is a bijection in which
// every bit of the input changes half of the bits of the output.
uint64_t mixed(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15ULL;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebULL;
  return bits ^ bits >> 31;
}

}  // namespace

SampleSeed sample_seed(int64_t seed, int64_t epoch, int64_t place,
                       size_t index) {
  uint64_t bits = mixed(static_cast<uint64_t>(seed));
  bits = mixed(bits ^ static_cast<uint64_t>(epoch));
  bits = mixed(bits ^ static_cast<uint64_t>(place));
  return {mixed(bits ^ uint64_t{index})};
}

}  // namespace internal
}  // namespace lockstep
