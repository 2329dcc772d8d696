#include "lockstep/data/held_dataset.h"

#include <c10/util/Exception.h>

#include <string>

namespace lockstep::internal {

void check_index(size_t index, size_t size, const char* dataset) {
  if (index < size) return;
  throw c10::IndexError(c10::str(dataset, ": index ", index,
                                 " is outside of a dataset of ", size,
                                 " samples"));
}

void throw_null_dataset() {
  throw std::invalid_argument(
      "the dataset is a std::shared_ptr that is null; give one to a dataset");
}

}  // namespace lockstep::internal

namespace lockstep {

int64_t DatasetSize::number_of(std::optional<size_t> size) {
  if (size) return static_cast<int64_t>(*size);
  throw std::invalid_argument(
      "the dataset does not know its size (size() returned none), which is "
      "needed to draw, select, repeat or join samples; give a sampler the "
      "number instead");
}

}  // namespace lockstep
