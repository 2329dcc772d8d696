#pragma once

#include <cstdint>
#include <vector>

// Sets of moments, and their arithmetic. All functions are pure.
namespace lockstep::internal {

// The moments from `begin` up to, but without, `end`, in nanoseconds. The end
// is never before the begin.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// A set of moments: intervals that are sorted, not empty, and apart from each
// other.
using Intervals = std::vector<Interval>;

// Returns the moments that are in at least one of `parts`, which may be in any
// order, overlap, or be empty.
Intervals united(std::vector<Interval> parts);

// Returns the moments of `a` or `b`, of `a` and `b`, of `a` but not `b`.
Intervals unite(const Intervals& a, const Intervals& b);
Intervals intersect(const Intervals& a, const Intervals& b);
Intervals subtract(const Intervals& a, const Intervals& b);

// Returns the moments of `set` that lie in `window`. Takes time for these only.
Intervals clip(const Intervals& set, Interval window);

int64_t total_length(const Intervals& set);

}  // namespace lockstep::internal
