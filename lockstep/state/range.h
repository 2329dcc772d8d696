#pragma once

#include <cstdint>

namespace lockstep::internal {

// Elements [begin, end) of a flat tensor. A range that was read from a file, or
// that a user gave, may be anything; in all others 0 <= begin <= end.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

}  // namespace lockstep::internal
