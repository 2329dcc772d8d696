#include "lockstep/comm/shm/protocol/staging_stores.h"

#include <algorithm>
#include <bit>

#include "lockstep/comm/shm/protocol/collective.h"

namespace lockstep::internal::shm {
namespace {

using kernels::Stores;

constexpr int kCompared = 16;
constexpr int kShortestPause = 64;
constexpr int kLongestPause = 512;
// So many calls in a row that take so much longer than usual end a pause.
constexpr int kSlowCalls = 4;
constexpr double kSlower = 1.5;
// The way must not change for a difference that chance makes.
constexpr double kClearly = 0.9;
constexpr double kFar = 1.3;
constexpr int kTriedIfFar = 2;

}  // namespace

std::pair<CollectiveKind, int> StagingStores::key(CollectiveKind kind,
                                                  size_t bytes) {
  return {kind, std::bit_width(bytes)};
}

Stores StagingStores::next(CollectiveKind kind, size_t bytes) {
  return calls_[key(kind, bytes)].next;
}

// A linear congruential generator, whose high bits are the random ones.
Stores StagingStores::draw() {
  random_ = random_ * 1664525 + 1013904223;
  return random_ >> 31 == 0 ? Stores::cached : Stores::streaming;
}

void StagingStores::took(CollectiveKind kind, size_t bytes,
                         std::chrono::nanoseconds time) {
  Calls& calls = calls_.at(key(kind, bytes));
  const double per_byte =
      static_cast<double>(std::max<int64_t>(time.count(), 1)) /
      static_cast<double>(bytes);
  if (calls.left > 0) {
    calls.slow = per_byte > kSlower * calls.usual ? calls.slow + 1 : 0;
    calls.left = calls.slow == kSlowCalls ? 0 : calls.left - 1;
  } else {
    compare(calls, per_byte);
  }
  calls.next = calls.left > 0 ? calls.best : draw();
}

void StagingStores::compare(Calls& calls, double time) {
  const auto other =
      calls.best == Stores::cached ? Stores::streaming : Stores::cached;
  const auto tried = [&](Stores stores) -> Tried& {
    return calls.tried[static_cast<size_t>(stores)];
  };
  ++tried(calls.next).calls;
  tried(calls.next).least = std::min(tried(calls.next).least, time);
  const Tried best = tried(calls.best);
  const Tried now = tried(other);
  const bool is_far = std::min(best.calls, now.calls) >= kTriedIfFar &&
                      now.least > kFar * best.least;
  if (!is_far && best.calls + now.calls < kCompared) return;
  const bool changes = now.least < kClearly * best.least;
  if (changes) calls.best = other;
  calls.pause = changes || calls.pause == 0
                    ? kShortestPause
                    : std::min(4 * calls.pause, kLongestPause);
  calls.left = calls.pause;
  calls.usual = tried(calls.best).least;
  calls.slow = 0;
  calls.tried = {};
}

}  // namespace lockstep::internal::shm
