#include "lockstep/comm/shm/protocol/staging_stores.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>

#include "lockstep/comm/shm/protocol/collective.h"

namespace lockstep::internal::shm {
namespace {

using kernels::Stores;
using std::chrono::microseconds;

constexpr StagedCalls kCalls{.kind = CollectiveKind::all_reduce,
                             .dtype = kernels::DType::float32,
                             .bytes = 1 << 20};

// Calls that take a given time in each way.
struct Machine {
  std::function<int(int call)> cached;
  std::function<int(int call)> streaming;
};

// Returns how many of the next `calls` were done past the caches.
int streamed(StagingStores& stores, const Machine& machine, int calls,
             const StagedCalls& like = kCalls) {
  int count = 0;
  for (int call = 0; call < calls; ++call) {
    const bool streams = stores.next(like) == Stores::streaming;
    count += streams;
    stores.took(like, microseconds(streams ? machine.streaming(call)
                                           : machine.cached(call)));
  }
  return count;
}

Machine constant(int cached, int streaming) {
  return {[=](int) { return cached; }, [=](int) { return streaming; }};
}

TEST(StagingStores, BeginWithTheCaches) {
  StagingStores stores;
  EXPECT_EQ(stores.next(kCalls), Stores::cached);
}

TEST(StagingStores, TakeTheBetterWayAndTryTheOtherOneRarely) {
  StagingStores stores;
  EXPECT_LE(streamed(stores, constant(100, 400), 10'000), 100);
  StagingStores others;
  streamed(others, constant(400, 100), 16);
  EXPECT_GE(streamed(others, constant(400, 100), 10'000), 9'900);
}

TEST(StagingStores, KeepTheirWayIfTheOtherOneIsHardlyBetter) {
  StagingStores stores;
  // Eight of each comparison.
  EXPECT_LE(streamed(stores, constant(100, 95), 10'000), 300);
}

TEST(StagingStores, FollowAMachineWhoseCoresMove) {
  StagingStores stores;
  streamed(stores, constant(100, 400), 10'000);
  // Calls that become slow are compared soon, others only after a pause.
  streamed(stores, constant(400, 200), 4 + 16);
  EXPECT_GE(streamed(stores, constant(400, 200), 1'000), 980);
  streamed(stores, constant(100, 200), 512 + 16);
  EXPECT_LE(streamed(stores, constant(100, 200), 1'000), 20);
}

// A rank that is preempted in a call makes it long.
TEST(StagingStores, ChooseByTheLeastTimes) {
  StagingStores stores;
  const auto often_long = [](int usual) {
    return [usual](int call) { return call % 3 == 0 ? 5'000 : usual; };
  };
  const Machine machine{often_long(400), often_long(200)};
  streamed(stores, machine, 100);
  EXPECT_GE(streamed(stores, machine, 1'000), 950);
}

TEST(StagingStores, DifferByTheSizeAndTheKindAndTheDtypeOfTheCall) {
  StagingStores stores;
  streamed(stores, constant(400, 200), 100);
  auto larger = kCalls;
  larger.bytes *= 4;
  auto gathers = kCalls;
  gathers.kind = CollectiveKind::all_gather;
  auto halves = kCalls;
  halves.dtype = kernels::DType::bfloat16;
  for (const auto& others : {larger, gathers, halves}) {
    EXPECT_LE(streamed(stores, constant(100, 400), 100, others), 10);
  }
  EXPECT_GE(streamed(stores, constant(400, 200), 50), 40);
}

}  // namespace
}  // namespace lockstep::internal::shm
