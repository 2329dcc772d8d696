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

// Returns rank `of`'s part if `elements` are divided equally between `ranks`.
// The parts are whole cache lines: two ranks that write to one line would take
// it from each other all the time. The last parts may be shorter, or empty.
Interval equal_slice(Interval elements, int of, int ranks,
                     size_t element_bytes);

// What one rank tells the others about the buckets that all will reduce
// (bucket_exchange.h).
struct BucketLayout {
  struct Bucket {
    size_t count;
    kernels::DType dtype;
    // Where the bucket lies; region 0 if no peer could reach it.
    RegisteredMemory::Place place;
    std::vector<Interval> owned;
  };
  bool everywhere;
  std::vector<Bucket> buckets;

  std::vector<uint64_t> encode() const;
  // Throws std::runtime_error if `words` is cut short.
  static BucketLayout decode(std::span<const uint64_t> words);
};

// Returns the first thing that the ranks disagree about, or nothing. `layouts`
// and the ranks' `names` are in rank order. The buckets must have equal counts
// and dtypes. Over all ranks, the owned ranges of a bucket must contain each
// element once, or there must be none.
std::optional<std::string> disagreement(std::span<const BucketLayout> layouts,
                                        std::span<const std::string> names);

}  // namespace lockstep::shm
