// Which sleeping threads a call or a message wakes. A rank's doorbell counts
// how often it is rung, and each ring is a system call.

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/comm/shm/protocol/message_engine.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 60s;

void await(const std::function<bool()>& condition) {
  const auto deadline = Deadline::after(kTimeout);
  while (!condition()) {
    ASSERT_FALSE(deadline.expired());
    std::this_thread::yield();
  }
}

RankState& state_of(ThreadWorld& world, int rank) {
  return world.group(rank).core().own();
}

// Runs a barrier of two ranks in one thread, in which neither rank waits.
void barrier_without_waiting(ThreadWorld& world) {
  const Collective::What what{
      .operation = CollectiveKind::barrier, .dtype = DType::uint8, .agreed = 0};
  Collective one(world.group(0).core(), what, kTimeout);
  Collective other(world.group(1).core(), what, kTimeout);
  one.announce(0);
  other.announce(0);
  one.wait_for_all();
  other.wait_for_all();
}

// Regression: a pending receive made each small collective a system call
// slower.
TEST(ShmDoorbell, ACollectiveDoesNotWakeAThreadThatSleepsForAMessage) {
  ThreadWorld world(2, small_tuning());
  auto& receiver = world.group(1);
  auto& state = state_of(world, 1);
  std::byte got{};
  const auto message = receiver.start_receive(0, 7, {&got, 1}, DType::uint8);
  std::jthread server(
      [&](std::stop_token stop) { receiver.serve_messages(std::move(stop)); });
  await([&] { return state.message_sleepers == 1; });
  const uint32_t rings = state.doorbell;
  for (int i = 0; i < 100; ++i) barrier_without_waiting(world);
  EXPECT_EQ(state.doorbell, rings);
  // The thread may just have woken up because its slice of time was over.
  await([&] { return state.message_sleepers == 1; });
  const std::byte sent{42};
  world.group(0).start_send(1, 7, {&sent, 1}, DType::uint8);
  await([&] { return message->ended.load(); });
  EXPECT_EQ(got, sent);
}

TEST(ShmDoorbell, AMessageWakesTheRankThatItIsFor) {
  ThreadWorld world(3, small_tuning());
  std::vector<std::jthread> waiting;
  for (const int rank : {1, 2}) {
    waiting.emplace_back(
        [&world, rank] { world.group(rank).barrier(kTimeout); });
  }
  // Rank 1 has a message under way, so its thread in the barrier sleeps for
  // both.
  std::byte got{};
  const auto message =
      world.group(1).start_receive(0, 7, {&got, 1}, DType::uint8);
  // Both are in the barrier: a rank that arrives wakes those that sleep.
  await([&] {
    return state_of(world, 1).sleepers == 1 && state_of(world, 2).sleepers == 1;
  });
  const uint32_t of_others = state_of(world, 2).doorbell;
  const std::byte sent{42};
  for (int i = 0; i < 100; ++i) {
    world.group(0).start_send(1, 8, {&sent, 1}, DType::uint8);
  }
  EXPECT_EQ(state_of(world, 2).doorbell, of_others);
  EXPECT_FALSE(message->ended);
  world.group(0).start_send(1, 7, {&sent, 1}, DType::uint8);
  world.group(0).barrier(kTimeout);
  waiting.clear();
  world.group(1).wait(*message, kTimeout);
  EXPECT_EQ(got, sent);
}

// The peer may call the collective only after it has the rest of a large
// message.
TEST(ShmDoorbell, ACollectiveWithAMessageUnderWaySleepsForBoth) {
  ThreadWorld world(2, small_tuning());
  std::byte got{};
  const auto message =
      world.group(1).start_receive(0, 7, {&got, 1}, DType::uint8);
  std::jthread waiting([&] { world.group(1).barrier(kTimeout); });
  auto& state = state_of(world, 1);
  await([&] { return state.sleepers == 1 && state.message_sleepers == 1; });
  const std::byte sent{42};
  world.group(0).start_send(1, 7, {&sent, 1}, DType::uint8);
  await([&] { return message->ended.load(); });
  world.group(0).barrier(kTimeout);
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
