#include "lockstep/data/sequential_sampler.h"

namespace lockstep {

SequentialSampler::SequentialSampler(int64_t dataset_size)
    : ResumableSampler(
          "SequentialSampler",
          internal::checked_size("SequentialSampler", dataset_size),
          dataset_size, /*seed=*/0, internal::Share{}, NextPass::next_epoch) {}

}  // namespace lockstep
