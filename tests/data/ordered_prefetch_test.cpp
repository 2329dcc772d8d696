#include "lockstep/data/ordered_prefetch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

TEST(OrderedPrefetch, HandsOutInOrderWhateverTheTiming) {
  for (int workers : {1, 2, 5}) {
    OrderedPrefetch<int64_t> prefetch(50, workers, 4, [](int64_t i) {
      // Every third item is slow, so later ones are ready before it.
      if (i % 3 == 0) std::this_thread::sleep_for(milliseconds(2));
      return i * i;
    });
    for (int64_t i = 0; i < 50; ++i) ASSERT_EQ(prefetch.next(), i * i);
  }
}

TEST(OrderedPrefetch, MakesNoMoreThanAllowedAhead) {
  std::atomic<int64_t> started{0};
  OrderedPrefetch<int64_t> prefetch(100, 3, 5, [&](int64_t i) {
    ++started;
    return i;
  });
  for (int64_t taken = 0; taken < 20; ++taken) {
    std::this_thread::sleep_for(milliseconds(2));
    EXPECT_LE(started.load(), taken + 5);
    EXPECT_EQ(prefetch.next(), taken);
  }
}

TEST(OrderedPrefetch, MovesItemsThatCannotBeCopied) {
  OrderedPrefetch<std::unique_ptr<int64_t>> prefetch(
      3, 2, 2, [](int64_t i) { return std::make_unique<int64_t>(i); });
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(**prefetch.next(), i);
}

TEST(OrderedPrefetch, AnErrorComesInItsPlaceAndStopsTheRest) {
  std::atomic<int64_t> highest{0};
  OrderedPrefetch<int64_t> prefetch(1000, 3, 6, [&](int64_t i) {
    highest = std::max(highest.load(), i);
    if (i == 4) throw std::out_of_range("item 4");
    return i;
  });
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(prefetch.next(), i);
  EXPECT_THROW(prefetch.next(), std::out_of_range);
  EXPECT_THROW(prefetch.next(), std::out_of_range);
  EXPECT_LT(highest.load(), 12);
}

TEST(OrderedPrefetch, ATimeoutReturnsNothing) {
  OrderedPrefetch<int64_t> prefetch(1, 1, 1, [](int64_t i) {
    std::this_thread::sleep_for(milliseconds(200));
    return i;
  });
  EXPECT_EQ(prefetch.next(milliseconds(5)), std::nullopt);
  EXPECT_EQ(prefetch.next(milliseconds(30000)), 0);
}

TEST(OrderedPrefetch, EndsAtAnyMoment) {
  for (int64_t taken = 0; taken < 12; ++taken) {
    std::atomic<int> running{0};
    {
      OrderedPrefetch<int64_t> prefetch(12, 3, 4, [&](int64_t i) {
        ++running;
        std::this_thread::sleep_for(milliseconds(1));
        --running;
        return i;
      });
      for (int64_t i = 0; i < taken; ++i) prefetch.next();
    }
    EXPECT_EQ(running.load(), 0) << "a worker outlived its owner";
  }
}

TEST(OrderedPrefetch, OfNothingStartsNothing) {
  OrderedPrefetch<int64_t> prefetch(0, 4, 8, [](int64_t) -> int64_t {
    throw std::logic_error("nothing was asked for");
  });
}

}  // namespace
}  // namespace lockstep::internal
