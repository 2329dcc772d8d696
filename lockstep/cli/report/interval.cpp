#include "lockstep/cli/report/interval.h"

#include <algorithm>

namespace lockstep::internal {
namespace {

// Appends `next`, which begins at or after the last interval of `set` does.
void append(Intervals& set, Interval next) {
  if (next.begin >= next.end) return;
  if (!set.empty() && next.begin <= set.back().end) {
    set.back().end = std::max(set.back().end, next.end);
  } else {
    set.push_back(next);
  }
}

}  // namespace

Intervals united(std::vector<Interval> parts) {
  std::ranges::sort(parts, {}, &Interval::begin);
  Intervals set;
  for (const Interval& part : parts) append(set, part);
  return set;
}

Intervals unite(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto one = a.begin();
  auto other = b.begin();
  while (one != a.end() || other != b.end()) {
    const bool take_one =
        other == b.end() || (one != a.end() && one->begin <= other->begin);
    append(set, take_one ? *one++ : *other++);
  }
  return set;
}

Intervals intersect(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto one = a.begin();
  auto other = b.begin();
  while (one != a.end() && other != b.end()) {
    append(set, {std::max(one->begin, other->begin),
                 std::min(one->end, other->end)});
    // The one that ends first cannot meet anything that comes later.
    if (one->end < other->end) {
      ++one;
    } else {
      ++other;
    }
  }
  return set;
}

Intervals subtract(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto other = b.begin();
  for (const Interval& one : a) {
    int64_t begin = one.begin;
    while (other != b.end() && other->end <= begin) ++other;
    for (auto hole = other; hole != b.end() && hole->begin < one.end; ++hole) {
      append(set, {begin, hole->begin});
      begin = hole->end;
    }
    append(set, {begin, one.end});
  }
  return set;
}

Intervals clip(const Intervals& set, Interval window) {
  Intervals inside;
  auto one = std::ranges::upper_bound(set, window.begin, {}, &Interval::end);
  for (; one != set.end() && one->begin < window.end; ++one) {
    append(inside, {std::max(one->begin, window.begin),
                    std::min(one->end, window.end)});
  }
  return inside;
}

int64_t total_length(const Intervals& set) {
  int64_t length = 0;
  for (const Interval& one : set) length += one.length();
  return length;
}

}  // namespace lockstep::internal
