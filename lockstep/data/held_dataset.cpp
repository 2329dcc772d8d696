#include "lockstep/data/held_dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

namespace lockstep::internal {

void check_index(size_t index, size_t size, const char* dataset) {
  if (index < size) return;
  throw c10::IndexError(c10::str(dataset, ": index ", index,
                                 " is outside of a dataset of ", size,
                                 " samples"));
}

std::pair<size_t, size_t> place_in_parts(size_t index,
                                         const std::vector<size_t>& ends,
                                         const char* dataset) {
  check_index(index, ends.empty() ? 0 : ends.back(), dataset);
  const auto end = std::upper_bound(ends.begin(), ends.end(), index);
  const auto part = static_cast<size_t>(end - ends.begin());
  return {part, part == 0 ? index : index - ends[part - 1]};
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
