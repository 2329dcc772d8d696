#include "lockstep/data/collate.h"

#include <ATen/Functions.h>

#include <stdexcept>

namespace lockstep::internal {

at::Tensor stack(std::vector<at::Tensor>&& samples) {
  return at::stack(samples);
}

at::Tensor empty_batch(at::ScalarType dtype, size_t size) {
  return at::empty({static_cast<int64_t>(size)},
                   at::TensorOptions(dtype).device(at::kCPU));
}

void throw_other_keys(size_t sample) {
  throw std::invalid_argument(
      "default_collate: the maps of the samples 0 and " +
      std::to_string(sample) +
      " of the batch have different keys; give each sample the same ones, or "
      "the loader a collate function");
}

void throw_other_length(size_t sample, size_t length, size_t first_length) {
  throw std::invalid_argument(
      "default_collate: the vector of sample 0 of the batch has " +
      std::to_string(first_length) + " elements, that of sample " +
      std::to_string(sample) + " has " + std::to_string(length) +
      "; give each sample as many, or the loader a collate function");
}

}  // namespace lockstep::internal
