#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/registered_memory.h"
#include "lockstep/kernels/dtype.h"

namespace lockstep::shm {

// Elements [begin, end).
struct Interval {
  size_t begin;
  size_t end;
  size_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// Rank `of`'s part where `elements` are divided equally between `ranks`, in
// whole cache lines: two ranks that write into one would take it from each
// other. The last parts may be shorter, or empty.
Interval equal_slice(Interval elements, int of, int ranks,
                     size_t element_bytes);

// What one rank says of the buckets that all are to reduce (bucket_exchange.h).
struct BucketLayout {
  struct Bucket {
    size_t count;
    kernels::DType dtype;
    // Where it lies; region 0 where no peer could reach it.
    RegisteredMemory::Place place;
    std::vector<Interval> owned;
  };
  bool everywhere;
  std::vector<Bucket> buckets;

  std::vector<uint64_t> encode() const;
  // Throws std::runtime_error if it is none.
  static BucketLayout decode(std::span<const uint64_t> words);
};

// What the ranks disagree about, the first of it; of layouts in rank order,
// where `names` are the ranks'. Beside counts and dtypes: over all ranks the
// owned intervals of a bucket are each element once, or there are none.
std::optional<std::string> disagreement(std::span<const BucketLayout> layouts,
                                        std::span<const std::string> names);

}  // namespace lockstep::shm
