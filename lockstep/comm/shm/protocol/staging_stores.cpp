#include "lockstep/comm/shm/protocol/staging_stores.h"

#include <algorithm>
#include <bit>

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

StagingStores::Key StagingStores::key(const StagedCalls& calls) {
  return {calls.kind, calls.dtype,
          static_cast<int>(std::bit_width(calls.bytes))};
}

Stores StagingStores::next(const StagedCalls& calls) {
  return choices_[key(calls)].next;
}

// A linear congruential generator, whose high bits are the random ones.
Stores StagingStores::draw() {
  random_ = random_ * 1664525 + 1013904223;
  return random_ >> 31 == 0 ? Stores::cached : Stores::streaming;
}

void StagingStores::took(const StagedCalls& calls,
                         std::chrono::nanoseconds time) {
  Choice& choice = choices_.at(key(calls));
  const double per_byte =
      static_cast<double>(std::max<int64_t>(time.count(), 1)) /
      static_cast<double>(calls.bytes);
  if (choice.left > 0) {
    choice.slow = per_byte > kSlower * choice.usual ? choice.slow + 1 : 0;
    choice.left = choice.slow == kSlowCalls ? 0 : choice.left - 1;
  } else {
    compare(choice, per_byte);
  }
  choice.next = choice.left > 0 ? choice.best : draw();
}

void StagingStores::compare(Choice& choice, double time) {
  const auto other =
      choice.best == Stores::cached ? Stores::streaming : Stores::cached;
  const auto tried = [&](Stores stores) -> Tried& {
    return choice.tried[static_cast<size_t>(stores)];
  };
  ++tried(choice.next).calls;
  tried(choice.next).least = std::min(tried(choice.next).least, time);
  const Tried best = tried(choice.best);
  const Tried now = tried(other);
  const bool is_far = std::min(best.calls, now.calls) >= kTriedIfFar &&
                      now.least > kFar * best.least;
  if (!is_far && best.calls + now.calls < kCompared) return;
  const bool changes = now.least < kClearly * best.least;
  if (changes) choice.best = other;
  choice.pause = changes || choice.pause == 0
                     ? kShortestPause
                     : std::min(4 * choice.pause, kLongestPause);
  choice.left = choice.pause;
  choice.usual = tried(choice.best).least;
  choice.slow = 0;
  choice.tried = {};
}

}  // namespace lockstep::internal::shm
