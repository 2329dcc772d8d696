#include "lockstep/data/sample_random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <stdexcept>
#include <string>

namespace lockstep {

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
