#include "lockstep/data/ordered_prefetch.h"

#include <gtest/gtest.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

TEST(OrderedPrefetch, HandsOutInOrderWhateverTheTiming) {
  for (int workers : {1, 2, 5}) {
    OrderedPrefetch<int64_t> prefetch(workers, 4);
    for (int64_t count : {50, 1, 3}) {
      prefetch.begin(count, [&](int64_t i) {
        // Every third item is slow, so later ones are ready before it.
        if (i % 3 == 0) std::this_thread::sleep_for(milliseconds(2));
        return i * i + count;
      });
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(prefetch.next(), i * i + count);
      }
      prefetch.end();
    }
  }
}

TEST(OrderedPrefetch, MakesNoMoreThanAllowedAhead) {
  std::atomic<int64_t> started{0};
  OrderedPrefetch<int64_t> prefetch(3, 5);
  prefetch.begin(100, [&](int64_t i) {
    ++started;
    return i;
  });
  for (int64_t taken = 0; taken < 20; ++taken) {
    std::this_thread::sleep_for(milliseconds(2));  // in which it could go on
    EXPECT_LE(started.load(), taken + 5);
    EXPECT_EQ(prefetch.next(), taken);
  }
}

// With as many items ahead as workers, each worker has one.
TEST(OrderedPrefetch, WorkersWorkAtTheSameTime) {
  std::atomic<int> inside{0};
  OrderedPrefetch<int64_t> prefetch(3, 3);
  prefetch.begin(3, [&](int64_t i) {
    ++inside;
    while (inside < 3) std::this_thread::yield();
    return i;
  });
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(prefetch.next(), i);
}

TEST(OrderedPrefetch, KeepsItsThreadsBetweenPasses) {
  OrderedPrefetch<std::thread::id> prefetch(2, 4);
  EXPECT_EQ(prefetch.threads(), 0);
  std::set<std::thread::id> seen;
  for (int pass = 0; pass < 20; ++pass) {
    prefetch.begin(10, [](int64_t) { return std::this_thread::get_id(); });
    // Every other pass is ended early.
    for (int i = 0; i < (pass % 2 == 0 ? 10 : 3); ++i) {
      seen.insert(*prefetch.next());
    }
    prefetch.end();
    EXPECT_EQ(prefetch.threads(), 2);
  }
  EXPECT_LE(seen.size(), 2u);
  EXPECT_FALSE(seen.contains(std::this_thread::get_id()));
}

TEST(OrderedPrefetch, StartsNoMoreThreadsThanItemsAhead) {
  OrderedPrefetch<int64_t> prefetch(8, 2);
  prefetch.begin(10, [](int64_t i) { return i; });
  EXPECT_EQ(prefetch.threads(), 2);
}

TEST(OrderedPrefetch, MovesItemsThatCannotBeCopied) {
  OrderedPrefetch<std::unique_ptr<int64_t>> prefetch(2, 2);
  prefetch.begin(3, [](int64_t i) { return std::make_unique<int64_t>(i); });
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(**prefetch.next(), i);
}

TEST(OrderedPrefetch, AnErrorComesInItsPlaceAndStopsTheRest) {
  OrderedPrefetch<int64_t> prefetch(3, 6);
  for (int pass = 0; pass < 3; ++pass) {
    std::atomic<int64_t> highest{0};
    prefetch.begin(1000, [&](int64_t i) {
      highest = std::max(highest.load(), i);
      if (i == 4) throw std::out_of_range("item 4");
      return i;
    });
    for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(prefetch.next(), i);
    EXPECT_THROW(prefetch.next(), std::out_of_range);
    EXPECT_THROW(prefetch.next(), std::out_of_range);
    prefetch.end();
    EXPECT_LT(highest.load(), 12);
  }
}

// Nobody would take the items after a failed one.
TEST(OrderedPrefetch, MakesNothingAfterAnError) {
  std::atomic<int64_t> highest{0};
  OrderedPrefetch<int64_t> prefetch(1, 6);
  prefetch.begin(1000, [&](int64_t i) {
    highest = i;
    if (i == 4) throw std::out_of_range("item 4");
    return i;
  });
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(prefetch.next(), i);
  EXPECT_THROW(prefetch.next(), std::out_of_range);
  std::this_thread::sleep_for(milliseconds(20));  // in which it could go on
  EXPECT_EQ(highest.load(), 4);
}

TEST(OrderedPrefetch, ATimeoutReturnsNothing) {
  std::promise<void> may_go_on;
  auto gate = may_go_on.get_future().share();
  OrderedPrefetch<int64_t> prefetch(1, 1);
  prefetch.begin(1, [=](int64_t i) {
    gate.wait();
    return i;
  });
  EXPECT_EQ(prefetch.next(milliseconds(5)), std::nullopt);
  may_go_on.set_value();
  EXPECT_EQ(prefetch.next(milliseconds(30000)), 0);
}

// The objects that a pass uses stay alive as long as one of its workers is
// stuck in it, and the next pass does not get its items.
TEST(OrderedPrefetch, AnAbandonedPassDoesNotDisturbTheNext) {
  std::promise<void> may_go_on;
  auto gate = may_go_on.get_future().share();
  auto used = std::make_shared<int64_t>(7);
  const std::weak_ptr<int64_t> alive = used;
  OrderedPrefetch<int64_t> prefetch(2, 2);
  prefetch.begin(5, [gate, used](int64_t i) {
    if (i == 0) gate.wait();
    return *used + i;
  });
  used.reset();
  EXPECT_EQ(prefetch.next(milliseconds(5)), std::nullopt);
  prefetch.abandon();
  EXPECT_FALSE(alive.expired());

  // The other worker makes the next pass.
  prefetch.begin(4, [](int64_t i) { return 100 + i; });
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(prefetch.next(), 100 + i);
  may_go_on.set_value();
  prefetch.end();
  prefetch.begin(4, [](int64_t i) { return 200 + i; });
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(prefetch.next(), 200 + i);
  prefetch.end();
}

TEST(OrderedPrefetch, EndsAtAnyMoment) {
  OrderedPrefetch<int64_t> kept(3, 4);
  for (bool is_kept : {false, true}) {
    for (int64_t taken = 0; taken < 12; ++taken) {
      std::atomic<int> running{0};
      auto used = std::make_shared<int>(0);
      const std::weak_ptr<int> alive = used;
      auto produce = [&running, used = std::move(used)](int64_t i) {
        ++running;
        std::this_thread::sleep_for(milliseconds(1));
        --running;
        return i;
      };
      std::optional<OrderedPrefetch<int64_t>> own;
      auto& prefetch = is_kept ? kept : own.emplace(3, 4);
      prefetch.begin(12, std::move(produce));
      for (int64_t i = 0; i < taken; ++i) prefetch.next();
      if (is_kept) {
        prefetch.end();
        EXPECT_TRUE(alive.expired()) << "a worker still has the pass";
      }
      own.reset();
      EXPECT_EQ(running.load(), 0) << "a worker outlived its pass";
      EXPECT_TRUE(alive.expired());
    }
  }
}

// Items that nobody takes end before end() returns.
TEST(OrderedPrefetch, LeavesNoItem) {
  auto counted = std::make_shared<int>(0);
  OrderedPrefetch<std::shared_ptr<int>> prefetch(3, 6);
  for (int pass = 0; pass < 50; ++pass) {
    prefetch.begin(100, [&](int64_t) { return counted; });
    for (int taken = 0; taken < pass % 4; ++taken) prefetch.next();
    prefetch.end();
    ASSERT_EQ(counted.use_count(), 1);
  }
}

TEST(OrderedPrefetch, OfNothingStartsNothing) {
  OrderedPrefetch<int64_t> prefetch(4, 8);
  prefetch.begin(0, [](int64_t) -> int64_t {
    throw std::logic_error("nothing was asked for");
  });
  EXPECT_EQ(prefetch.threads(), 0);
  prefetch.end();
  prefetch.end();
}

// A bug: a child process that was forked after a pass waited for ever, in its
// own pass and when the object ended.
TEST(OrderedPrefetch, RefusesAChildOfTheProcessThatHasItsWorkers) {
  std::optional<OrderedPrefetch<int64_t>> prefetch(std::in_place, 2, 4);
  const auto identity = [](int64_t i) { return i; };
  prefetch->begin(8, identity);
  EXPECT_EQ(prefetch->next(), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int refused = 0;
    for (const bool begins : {false, true}) {
      try {
        if (begins) {
          prefetch->end();
          prefetch->begin(8, identity);
        } else {
          prefetch->next();
        }
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
    prefetch.reset();
    _exit(refused);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_EQ(prefetch->next(), 1);
}

}  // namespace
}  // namespace lockstep::internal
