#include "lockstep/parallel/zero/partition.h"

#include <algorithm>
#include <numeric>

namespace lockstep::internal {

Partition::Partition(int world_size, bool cut)
    : cut_(cut), bytes_(static_cast<size_t>(world_size)) {}

std::vector<Ranges> Partition::add(const std::vector<at::Tensor>& parameters) {
  const auto world_size = static_cast<int64_t>(bytes_.size());
  std::vector<Ranges> all(parameters.size());
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return parameters[a].nbytes() > parameters[b].nbytes();
  });
  for (size_t index : order) {
    const at::Tensor& parameter = parameters[index];
    const int64_t numel = parameter.numel();
    const auto item = static_cast<int64_t>(parameter.element_size());
    if (!cut_ || numel < kSmall * world_size ||
        !parameter.is_non_overlapping_and_dense()) {
      all[index] = whole(numel, numel * item);
      continue;
    }
    const int64_t piece = numel / world_size / kGrain * kGrain;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const int64_t end = rank + 1 < world_size ? piece * (rank + 1) : numel;
      all[index].push_back({piece * rank, end});
      bytes_[static_cast<size_t>(rank)] += (end - piece * rank) * item;
    }
  }
  return all;
}

Ranges Partition::whole(int64_t numel, int64_t bytes) {
  const auto least = std::min_element(bytes_.begin(), bytes_.end());
  *least += bytes;
  Ranges ranges;
  for (auto rank = bytes_.begin(); rank != bytes_.end(); ++rank) {
    // Ranks before the owner get an empty range at the start, ranks after it
    // one at the end.
    ranges.push_back({rank > least ? numel : 0, rank < least ? 0 : numel});
  }
  return ranges;
}

}  // namespace lockstep::internal
