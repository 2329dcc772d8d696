#include "lockstep/data/sample_seed.h"

#include <ATen/CPUGeneratorImpl.h>

#include "lockstep/data/sample_random.h"

namespace lockstep {

at::Generator SampleSeed::generator() const {
  return at::make_generator<at::CPUGeneratorImpl>(value);
}

namespace internal {

SampleSeed sample_seed(int64_t seed, int64_t epoch, int64_t place,
                       size_t index) {
  return {SampleRandom(static_cast<uint64_t>(seed), epoch,
                       static_cast<uint64_t>(place), /*stream=*/index)
              .bits()};
}

}  // namespace internal
}  // namespace lockstep
