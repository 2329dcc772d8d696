// How ranks announce that they leave. This uses only the store, so these tests
// need no GPU.
#include "lockstep/comm/nccl/departure.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::internal::nccl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLongEnough{30};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// One rank that watches for departures.
struct Watcher {
  explicit Watcher(const StorePtr& store, int size = 2)
      : departure(store, size, [this](int rank) { left.set_value(rank); }) {}
  // Returns the rank that left, or -1 if none left within `time`.
  int wait(milliseconds time) {
    auto word = left.get_future();
    if (word.wait_for(time) != std::future_status::ready) return -1;
    return word.get();
  }
  std::promise<int> left;
  Departure departure;
};

c10::intrusive_ptr<c10d::TCPStore> host() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<c10d::TCPStore> guest(const c10d::TCPStore& of) {
  c10d::TCPStoreOptions options;
  options.port = of.getPort();
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

TEST(Departure, IsHeardByAllTheOthersAndNotByTheOneThatLeaves) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watcher zero(store, 3), one(store, 3), two(store, 3);
  two.departure.announce(7);
  EXPECT_EQ(zero.wait(kLongEnough), 7);
  EXPECT_EQ(one.wait(kLongEnough), 7);
  zero.departure.stop();
  EXPECT_TRUE(zero.departure.seen());
  EXPECT_EQ(two.wait(milliseconds(0)), -1);
  EXPECT_FALSE(two.departure.seen());
}

TEST(Departure, OfTheFirstIsWhatThoseWhoComeLaterHear) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watcher zero(store), one(store);
  zero.departure.announce(0);
  EXPECT_EQ(one.wait(kLongEnough), 0);
  one.departure.announce(1);  // leaves because rank 0 left
  Watcher two(store);
  EXPECT_EQ(two.wait(kLongEnough), 0);
}

TEST(Departure, IsHeardLongAfterTheStart) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watcher zero(store), one(store);
  // Sleeps longer than a slice of its wait.
  std::this_thread::sleep_for(milliseconds(600));
  one.departure.announce(1);
  EXPECT_EQ(zero.wait(kLongEnough), 1);
}

TEST(Departure, OfTheHostOfTheStoreIsHeardBeforeTheStoreIsGone) {
  for (int round = 0; round < 4; ++round) {
    auto hosted = host();
    auto own = guest(*hosted);
    Watcher one(own);
    auto zero = std::make_unique<Departure>(hosted, 2, [](int) {});
    zero->announce(0);
    zero.reset();
    hosted.reset();
    EXPECT_EQ(one.wait(kLongEnough), 0);
  }
}

// A bug: the host of the store ended before another rank had read the notice,
// which then waited for the group's timeout.
TEST(Departure, EndsNoRankBeforeTheOthersHaveHeardOfIt) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> last_listens = false;
  std::promise<bool> told;
  Departure zero(store, 3, [&](int) { told.set_value(last_listens); });
  Departure one(store, 3, [](int) {});
  const auto leaves = std::async(std::launch::async, [&] { one.announce(1); });
  while (!zero.seen()) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(100));
  last_listens = true;
  Watcher two(store, 3);
  EXPECT_TRUE(told.get_future().get());
  EXPECT_EQ(two.wait(kLongEnough), 1);
}

TEST(Departure, ANormalEndOfTheStoreIsNone) {
  auto hosted = host();
  auto own = guest(*hosted);
  Watcher one(own);
  hosted.reset();
  EXPECT_EQ(one.wait(seconds(1)), -1);
  EXPECT_FALSE(one.departure.seen());
}

TEST(Departure, OfOneGroupIsNotHeardInAnother) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watcher here(c10::make_intrusive<c10d::PrefixStore>("1/cuda/", store));
  Departure there(c10::make_intrusive<c10d::PrefixStore>("2/cuda/", store), 2,
                  [](int) {});
  there.announce(0);
  EXPECT_EQ(here.wait(seconds(1)), -1);
}

TEST(Departure, ToAStoreThatIsGoneIsNoError) {
  auto hosted = host();
  auto own = guest(*hosted);
  Departure one(own, 2, [](int) {});
  hosted.reset();
  one.announce(1);
}

TEST(Departure, IsWaitedForInSilence) {
  auto hosted = host();
  auto own = guest(*hosted);
  ::testing::internal::CaptureStderr();
  Watcher zero(hosted), one(own);
  EXPECT_EQ(zero.wait(milliseconds(700)), -1);
  one.departure.announce(1);
  zero.departure.stop();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace lockstep::internal::nccl
