#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/bucket_terms.h"
#include "lockstep/comm/shm/protocol/registered_memory.h"
#include "lockstep/kernels/dtype.h"
#include "lockstep/state/box.h"

namespace lockstep::internal::shm {

// One bucket of a rank: `count` elements of a floating dtype.
struct Bucket {
  void* data;  // in registered memory of that rank; null in a peer's layout
  size_t count;
  kernels::DType dtype;
  // The ranges that the rank reduces. Empty on all ranks: equal_slice().
  std::vector<Range> owned{};
  // Ascending and disjoint, the same on all ranks: the ranges whose
  // contribution may lie elsewhere (BucketExchange::publish()).
  std::vector<Range> movable{};
};

// Pieces of this size stay in the nearest caches while they are written to all
// destinations.
inline constexpr size_t kPieceBytes = size_t{16} << 10;

// Returns `what` / `by`, rounded up.
template <typename Number>
constexpr Number divided_up(Number what, std::type_identity_t<Number> by) {
  return (what + by - 1) / by;
}

// Returns rank `of`'s part if `elements` are divided equally between `ranks`.
// The parts are whole cache lines: two ranks that write to one line would take
// it from each other all the time. The last parts may be shorter, or empty.
Range equal_slice(Range elements, int of, int ranks, size_t element_bytes);

// One rank's description of the buckets that all will reduce
// (bucket_exchange.h).
struct BucketLayout {
  Results results;
  std::vector<Bucket> buckets;
  // Where each bucket lies; region 0 if no peer could reach it.
  std::vector<RegisteredMemory::Place> places{};
  // Where contributions to movable ranges may lie; region 0: nowhere.
  RegisteredMemory::Place arena{.region = 0, .offset = 0};
  uint64_t arena_bytes = 0;

  std::vector<uint64_t> encode() const;
  // Throws std::runtime_error if `words` is cut short.
  static BucketLayout decode(std::span<const uint64_t> words);
};

// Returns the first thing that the ranks disagree about, or nothing. `layouts`
// and the ranks' `names` are in rank order. The buckets must have equal counts
// and dtypes and movable ranges. Over all ranks, the owned ranges of a bucket
// must contain each element once, or there must be none.
std::optional<std::string> disagreement(std::span<const BucketLayout> layouts,
                                        std::span<const std::string> names);

}  // namespace lockstep::internal::shm
