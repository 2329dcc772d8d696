#include "lockstep/data/selection.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/data/epoch_order.h"

namespace lockstep::internal {

Selection Selection::subset(std::vector<size_t> indices, size_t size) {
  for (size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= size) {
      throw std::invalid_argument(
          "Subset: index " + std::to_string(indices[i]) + " (at place " +
          std::to_string(i) + " of the list) is outside of a dataset of " +
          std::to_string(size) + " samples");
    }
  }
  Selection selection("Subset", indices.size());
  selection.indices_ = std::move(indices);
  return selection;
}

Selection Selection::taken(size_t count, size_t first, size_t size) {
  if (first > size || count > size - first) {
    throw std::invalid_argument(
        "TakeDataset: " + std::to_string(count) + " samples from number " +
        std::to_string(first) + " on were asked for; the dataset has " +
        std::to_string(size));
  }
  Selection selection("TakeDataset", count);
  selection.first_ = first;
  selection.period_ = count;
  return selection;
}

Selection Selection::repeated(size_t times, size_t size) {
  // The indices are int64 in samplers.
  constexpr size_t kMost = std::numeric_limits<int64_t>::max();
  if (size > 0 && times > kMost / size) {
    throw std::invalid_argument("RepeatedDataset: " + std::to_string(size) +
                                " samples cannot be repeated " +
                                std::to_string(times) +
                                " times; their number would not fit an int64");
  }
  Selection selection("RepeatedDataset", size * times);
  selection.period_ = size;
  return selection;
}

void throw_nothing_to_join() {
  throw std::invalid_argument(
      "ConcatDataset: there is no dataset; give one or more");
}

namespace {

std::vector<size_t> random_indices(size_t size, uint64_t seed) {
  const at::Tensor order = random_order(static_cast<int64_t>(size), seed);
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + size};
}

}  // namespace

Selection Selection::shuffled(uint64_t seed, size_t size) {
  Selection selection("ShuffledDataset", size);
  selection.indices_ = random_indices(size, seed);
  return selection;
}

std::vector<std::vector<size_t>> split_at_random(
    size_t size, const std::vector<double>& lengths, uint64_t seed) {
  std::string text;
  for (const double length : lengths) {
    if (!(length >= 0)) {
      throw std::invalid_argument("random_split: a length is " +
                                  std::to_string(length) +
                                  "; it must be 0 or more");
    }
    text += (text.empty() ? "" : " + ") + std::to_string(length);
  }
  const double sum = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  std::vector<size_t> counts;
  size_t used = 0;
  // These are Python's conditions: math.isclose(sum, 1) and sum <= 1.
  if (sum <= 1 && 1 - sum <= 1e-9) {
    for (const double fraction : lengths) {
      counts.push_back(static_cast<size_t>(
          std::floor(static_cast<double>(size) * fraction)));
      used += counts.back();
    }
    for (size_t i = 0; used < size; ++i, ++used) ++counts[i % counts.size()];
  } else if (sum == static_cast<double>(size)) {
    for (const double length : lengths) {
      counts.push_back(static_cast<size_t>(length));
      used += counts.back();
    }
  }
  if (used != size) {
    throw std::invalid_argument(
        "random_split: the lengths are " + (text.empty() ? "none" : text) +
        "; give numbers of samples that add up to " + std::to_string(size) +
        ", the size of the dataset, or fractions that add up to 1");
  }
  const std::vector<size_t> order = random_indices(size, seed);
  std::vector<std::vector<size_t>> parts;
  auto next = order.begin();
  for (const size_t count : counts) {
    const auto end = next + static_cast<std::ptrdiff_t>(count);
    parts.emplace_back(next, end);
    next = end;
  }
  return parts;
}

}  // namespace lockstep::internal
