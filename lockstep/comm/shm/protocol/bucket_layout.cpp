#include "lockstep/comm/shm/protocol/bucket_layout.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/shm/protocol/layout.h"

namespace lockstep::internal::shm {
namespace {

std::string bucket_name(size_t bucket, size_t of) {
  return "bucket " + std::to_string(bucket + 1) + " of " + std::to_string(of);
}

std::string text_of(const BucketLayout& layout) {
  return std::to_string(layout.buckets.size()) + " buckets with results " +
         (layout.results == Results::everywhere ? "everywhere"
                                                : "where they are owned");
}

std::string text_of(const BucketLayout& layout, size_t bucket) {
  const auto& one = layout.buckets[bucket];
  return bucket_name(bucket, layout.buckets.size()) + " holds " +
         std::to_string(one.count) + " " + kernels::name_of(one.dtype) +
         (one.movable.empty()
              ? ""
              : ", " + std::to_string(one.movable.size()) +
                    " gradients reduced where backward computes them");
}

// Returns what is wrong with the owners of one bucket, of which all ranks have
// the same size and dtype.
std::optional<std::string> wrong_owners(std::span<const BucketLayout> layouts,
                                        std::span<const std::string> names,
                                        size_t bucket) {
  struct Owned {
    Range elements;
    size_t rank;
  };
  std::vector<Owned> all;
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    for (const auto& elements : layouts[rank].buckets[bucket].owned) {
      if (elements.begin != elements.end) all.push_back({elements, rank});
    }
  }
  if (all.empty()) return std::nullopt;
  std::ranges::sort(all, {}, [](const Owned& owned) {
    return std::pair(owned.elements.begin, owned.elements.end);
  });
  const auto count = static_cast<int64_t>(layouts[0].buckets[bucket].count);
  const auto where = " of " + bucket_name(bucket, layouts[0].buckets.size()) +
                     " (" + std::to_string(count) + " elements)";
  int64_t end = 0;
  for (const auto& [elements, rank] : all) {
    if (elements.begin < 0 || elements.begin > elements.end ||
        elements.end > count) {
      return names[rank] + " owns elements " + std::to_string(elements.begin) +
             " to " + std::to_string(elements.end) + where;
    }
    if (elements.begin != end) {
      return (elements.begin < end ? "two ranks own element "
                                   : "no rank owns element ") +
             std::to_string(std::min(elements.begin, end)) + where;
    }
    end = elements.end;
  }
  if (end != count) {
    return "no rank owns element " + std::to_string(end) + where;
  }
  return std::nullopt;
}

}  // namespace

Range equal_slice(Range elements, int of, int ranks, size_t element_bytes) {
  const auto line = static_cast<int64_t>(kCacheLine / element_bytes);
  const int64_t each =
      divided_up(divided_up(elements.size(), ranks), line) * line;
  return {std::min(elements.begin + of * each, elements.end),
          std::min(elements.begin + (of + 1) * each, elements.end)};
}

std::vector<uint64_t> BucketLayout::encode() const {
  std::vector<uint64_t> words{static_cast<uint64_t>(results), arena.region,
                              arena.offset, arena_bytes, buckets.size()};
  const auto add = [&](const std::vector<Range>& ranges) {
    words.push_back(ranges.size());
    for (const auto& [begin, end] : ranges) {
      words.insert(words.end(),
                   {static_cast<uint64_t>(begin), static_cast<uint64_t>(end)});
    }
  };
  for (size_t i = 0; i < buckets.size(); ++i) {
    const auto& bucket = buckets[i];
    words.insert(words.end(),
                 {bucket.count, static_cast<uint64_t>(bucket.dtype),
                  places[i].region, places[i].offset});
    add(bucket.owned);
    add(bucket.movable);
  }
  return words;
}

BucketLayout BucketLayout::decode(std::span<const uint64_t> words) {
  size_t at = 0;
  auto next = [&] {
    if (at == words.size()) {
      throw std::runtime_error("the layout of a peer's buckets is cut short");
    }
    return words[at++];
  };
  const auto ranges = [&] {
    std::vector<Range> all;
    for (uint64_t left = next(); left > 0; --left) {
      const auto begin = static_cast<int64_t>(next());
      all.push_back({.begin = begin, .end = static_cast<int64_t>(next())});
    }
    return all;
  };
  BucketLayout layout{.results = static_cast<Results>(next()), .buckets = {}};
  layout.arena = {.region = static_cast<uint32_t>(next()), .offset = next()};
  layout.arena_bytes = next();
  for (uint64_t left = next(); left > 0; --left) {
    Bucket bucket{.data = nullptr,
                  .count = next(),
                  .dtype = static_cast<kernels::DType>(next())};
    layout.places.push_back(
        {.region = static_cast<uint32_t>(next()), .offset = next()});
    bucket.owned = ranges();
    bucket.movable = ranges();
    layout.buckets.push_back(std::move(bucket));
  }
  return layout;
}

std::optional<std::string> disagreement(std::span<const BucketLayout> layouts,
                                        std::span<const std::string> names) {
  const auto& first = layouts[0];
  auto pair = [&](const std::string& text, size_t rank,
                  const std::string& other) {
    return names[0] + ": " + text + "; " + names[rank] + ": " + other;
  };
  for (size_t rank = 1; rank < layouts.size(); ++rank) {
    if (text_of(layouts[rank]) != text_of(first)) {
      return pair(text_of(first), rank, text_of(layouts[rank]));
    }
  }
  for (size_t bucket = 0; bucket < first.buckets.size(); ++bucket) {
    for (size_t rank = 1; rank < layouts.size(); ++rank) {
      if (text_of(layouts[rank], bucket) != text_of(first, bucket)) {
        return pair(text_of(first, bucket), rank,
                    text_of(layouts[rank], bucket));
      }
    }
    for (size_t rank = 1; rank < layouts.size(); ++rank) {
      if (layouts[rank].buckets[bucket].movable !=
          first.buckets[bucket].movable) {
        return names[0] + " and " + names[rank] +
               " reduce different gradients of " +
               bucket_name(bucket, first.buckets.size()) +
               " where backward computes them";
      }
    }
    if (auto wrong = wrong_owners(layouts, names, bucket)) return wrong;
  }
  return std::nullopt;
}

}  // namespace lockstep::internal::shm
