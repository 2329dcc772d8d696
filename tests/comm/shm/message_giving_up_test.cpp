// Messages that one end gives up before they have ended: which end may use the
// data then, what the other end gets, and that the ring still works. Ranks do
// only what a test calls, so each stops at the point that the test wants.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/comm/shm/protocol/message_engine.h"
#include "tests/comm/shm/message_world.h"

namespace lockstep::internal::shm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Buffer = std::vector<uint8_t>;
using Handle = std::shared_ptr<Message>;

constexpr size_t kLarge = size_t{1} << 20;  // four rings
constexpr uint8_t kRefilled = 0xa5;

void give_up(MessageRank& rank, const Handle& message) {
  rank.engine.give_up(*message, " was given up");
}

void refill(Buffer& data) { std::ranges::fill(data, kRefilled); }
bool is_refilled(const Buffer& data) {
  return data == Buffer(data.size(), kRefilled);
}

// Drives both ends until nothing moves.
void move_all(MessageWorld& world, int size = 2) {
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < size; ++rank) moved |= world[rank].engine.drive();
  }
}

// Expects that rank 1 receives a whole message from rank 0.
void expect_to_arrive(MessageWorld& world, int tag, size_t bytes) {
  const auto sent = pattern(bytes, 77);
  Buffer got(bytes);
  const auto send = world[0].send(1, tag, sent);
  const auto receive = world[1].receive(0, tag, got);
  move_all(world);
  ASSERT_TRUE(send->ended && receive->ended);
  MessageEngine::throw_if_failed(*receive);
  EXPECT_TRUE(got == sent);
}

void expect_idle(MessageWorld& world) {
  EXPECT_FALSE(world[0].engine.busy());
  EXPECT_FALSE(world[1].engine.busy());
}

std::string failure_of(const Handle& message) {
  EXPECT_TRUE(message->ended);
  return error_of<MessageGivenUp>(
      [&] { MessageEngine::throw_if_failed(*message); });
}

TEST(MessageGivingUp, IsWhatAWaitThatRunsOutDoes) {
  MessageWorld world(2);
  Buffer got(16);
  const auto receive = world[1].receive(0, 7, got);
  EXPECT_THAT(error_of<MessageGivenUp>([&] { world[1].wait(receive, 20ms); }),
              AllOf(HasSubstr("a message from rank 0 (tag 7, 16 bytes) has not "
                              "come after "),
                    HasSubstr("(allowed 20 ms)"), HasSubstr("given up")));
  EXPECT_TRUE(receive->ended);
  const auto large = pattern(kLarge, 2);
  const auto send = world[0].send(1, 9, large);
  EXPECT_THAT(error_of<MessageGivenUp>([&] { world[0].wait(send, 20ms); }),
              AllOf(HasSubstr("a message to rank 1 (tag 9, 1048576 bytes) has "
                              "not been taken after "),
                    HasSubstr("(allowed 20 ms)"), HasSubstr("given up")));
  // A second wait reports the same failure.
  EXPECT_THAT(error_of<MessageGivenUp>([&] { world[0].wait(send); }),
              HasSubstr("(allowed 20 ms)"));
}

TEST(MessageGivingUp, OfAReceiveThatNothingCameForLeavesItToTheNext) {
  for (const size_t bytes : {size_t{16}, kLarge}) {
    MessageWorld world(2);
    Buffer given_up(bytes);
    const auto receive = world[1].receive(0, 7, given_up);
    give_up(world[1], receive);
    EXPECT_THAT(failure_of(receive), HasSubstr("from rank 0 (tag 7"));
    refill(given_up);
    EXPECT_FALSE(world[1].engine.busy());
    expect_to_arrive(world, 7, bytes);
    EXPECT_TRUE(is_refilled(given_up));
    expect_idle(world);
  }
}

TEST(MessageGivingUp, OfAReceiveInTheMiddleLeavesTheWholeToTheNext) {
  for (const bool next_waits_already : {false, true}) {
    for (const bool aside : {false, true}) {
      SCOPED_TRACE(testing::Message() << next_waits_already << aside);
      MessageWorld world(2);
      const auto sent = pattern(kLarge, 1);
      Buffer other(1);
      Handle of_other_tag;
      const auto send = world[0].send(1, 7, sent);
      if (aside) {
        of_other_tag = world[1].receive(0, 8, other);
        world[0].engine.drive();
        world[1].engine.drive();
      }
      Buffer given_up(kLarge);
      const auto receive = world[1].receive(0, 7, given_up);
      Buffer got(kLarge);
      Handle next;
      if (next_waits_already) next = world[1].receive(0, 7, got);
      world[0].engine.drive();
      world[1].engine.drive();
      ASSERT_FALSE(receive->ended);
      give_up(world[1], receive);
      refill(given_up);
      EXPECT_THAT(failure_of(receive), HasSubstr("given up"));
      if (!next_waits_already) {
        // The rest of the message is put aside in memory of its own.
        move_all(world);
        EXPECT_TRUE(send->ended);
        next = world[1].receive(0, 7, got);
      }
      move_all(world);
      ASSERT_TRUE(next->ended);
      MessageEngine::throw_if_failed(*next);
      EXPECT_TRUE(got == sent);
      EXPECT_TRUE(is_refilled(given_up));
      if (aside) {
        world[0].send(1, 8, Buffer{42});
        world[1].wait(of_other_tag);
        EXPECT_EQ(other, Buffer{42});
      }
      expect_to_arrive(world, 7, kLarge);
      expect_idle(world);
    }
  }
}

TEST(MessageGivingUp, OfAReceiveThatDoesNotFitTellsTheMismatch) {
  MessageWorld world(2);
  const auto sent = pattern(kLarge, 1);
  const auto send = world[0].send(1, 7, sent);
  Buffer smaller(kLarge - 1);
  const auto receive = world[1].receive(0, 7, smaller);
  ASSERT_FALSE(receive->ended);
  give_up(world[1], receive);
  EXPECT_THAT(
      error_of<CallMismatch>([&] { MessageEngine::throw_if_failed(*receive); }),
      HasSubstr("1048575 bytes"));
  expect_to_arrive(world, 7, kLarge);
  EXPECT_TRUE(send->ended);
  expect_idle(world);
}

TEST(MessageGivingUp, OfASendFailsTheReceiveThatItBelongsTo) {
  for (const size_t bytes : {size_t{16}, kLarge}) {
    for (const bool receive_waits_already : {false, true}) {
      SCOPED_TRACE(testing::Message() << bytes << receive_waits_already);
      MessageWorld world(2);
      // The first message fills the ring, so small ones do not begin.
      const auto first = pattern(kLarge, 1);
      Handle filling;
      if (bytes < kLarge) filling = world[0].send(1, 7, first);
      auto given_up = pattern(bytes, 2);
      const auto send = world[0].send(1, 7, given_up);
      const auto sent = pattern(bytes, 3);
      const auto next = world[0].send(1, 7, sent);
      Buffer got_first(kLarge);
      Buffer got(bytes);
      Handle receive;
      if (receive_waits_already && bytes == kLarge) {
        receive = world[1].receive(0, 7, got);
        world[0].engine.drive();
      }
      ASSERT_FALSE(send->ended);
      give_up(world[0], send);
      refill(given_up);
      EXPECT_THAT(failure_of(send), HasSubstr("to rank 1 (tag 7"));
      EXPECT_TRUE(world[0].engine.busy());
      if (filling) {
        const auto receive_first = world[1].receive(0, 7, got_first);
        move_all(world);
        MessageEngine::throw_if_failed(*receive_first);
        EXPECT_TRUE(got_first == first);
      }
      if (!receive) receive = world[1].receive(0, 7, got);
      move_all(world);
      EXPECT_THAT(failure_of(receive),
                  AllOf(HasSubstr("rank 0 gave up sending " +
                                  std::to_string(bytes) + " bytes"),
                        HasSubstr("tag 7"), HasSubstr("to rank 1")));
      const auto last = world[1].receive(0, 7, got);
      move_all(world);
      ASSERT_TRUE(last->ended && next->ended);
      MessageEngine::throw_if_failed(*last);
      EXPECT_TRUE(got == sent);
      expect_to_arrive(world, 7, kLarge);
      expect_idle(world);
    }
  }
}

TEST(MessageGivingUp, OfSendsOneAfterTheOtherInTheMiddleIsToldOfEach) {
  MessageWorld world(2);
  constexpr int kMessages = 5;
  std::vector<Buffer> got(kMessages + 1, Buffer(kLarge));
  std::vector<Handle> receives;
  for (auto& one : got) receives.push_back(world[1].receive(0, 7, one));
  std::vector<Handle> sends;
  std::vector<Buffer> sent;
  for (int i = 0; i < kMessages; ++i) {
    sent.push_back(pattern(kLarge, i));
    sends.push_back(world[0].send(1, 7, sent.back()));
    // The reader takes all that is in the ring. So the next message begins
    // before the reader has seen the end of this one.
    if (i < 2) world[1].engine.drive();
    give_up(world[0], sends.back());
    refill(sent.back());
  }
  const auto last_sent = pattern(kLarge, 99);
  const auto last = world[0].send(1, 7, last_sent);
  move_all(world);
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_THAT(failure_of(receives[i]), HasSubstr("rank 0 gave up")) << i;
  }
  ASSERT_TRUE(last->ended && receives.back()->ended);
  MessageEngine::throw_if_failed(*receives.back());
  EXPECT_TRUE(got.back() == last_sent);
  expect_idle(world);
}

TEST(MessageGivingUp, OfASendIsRememberedForALaterReceiveOfItsTag) {
  for (const bool begun : {false, true}) {
    SCOPED_TRACE(begun);
    MessageWorld world(3);
    auto given_up = pattern(kLarge, 1);
    const auto filling = pattern(kLarge, 2);
    Handle first;
    if (!begun) first = world[0].send(1, 8, filling);
    const auto send = world[0].send(1, 7, given_up);
    give_up(world[0], send);
    refill(given_up);
    const Buffer mark_sent{42};
    const auto mark = world[0].send(1, 9, mark_sent);
    Buffer got_mark(1);
    Buffer got(kLarge);
    const auto of_mark = world[1].receive(0, 9, got_mark);
    move_all(world, 3);
    ASSERT_TRUE(of_mark->ended);
    EXPECT_EQ(got_mark, mark_sent);
    EXPECT_TRUE(mark->ended);
    const auto receive = world[1].receive(Group::kAnySource, 7, got);
    EXPECT_THAT(failure_of(receive), HasSubstr("rank 0 gave up"));
    if (first) {
      const auto whole = world[1].receive(0, 8, got);
      move_all(world, 3);
      MessageEngine::throw_if_failed(*whole);
      EXPECT_TRUE(got == filling);
    }
    expect_to_arrive(world, 7, kLarge);
    expect_idle(world);
  }
}

TEST(MessageGivingUp, OfBothEndsInTheMiddleLeavesTheFailureToTheNextReceive) {
  for (const bool sender_first : {false, true}) {
    SCOPED_TRACE(sender_first);
    MessageWorld world(2);
    auto given_up = pattern(kLarge, 1);
    const auto send = world[0].send(1, 7, given_up);
    Buffer got(kLarge);
    const auto receive = world[1].receive(0, 7, got);
    if (sender_first) give_up(world[0], send);
    give_up(world[1], receive);
    if (!sender_first) give_up(world[0], send);
    refill(given_up);
    refill(got);
    move_all(world);
    EXPECT_TRUE(is_refilled(got));
    Buffer next(kLarge);
    EXPECT_THAT(failure_of(world[1].receive(0, 7, next)),
                HasSubstr("rank 0 gave up"));
    expect_to_arrive(world, 7, 16);
    expect_idle(world);
  }
}

TEST(MessageGivingUp, OfAMessageThatHasEndedDoesNothing) {
  MessageWorld world(2);
  const auto sent = pattern(100, 1);
  const auto send = world[0].send(1, 7, sent);
  Buffer got(100);
  const auto receive = world[1].receive(0, 7, got);
  ASSERT_TRUE(send->ended && receive->ended);
  give_up(world[0], send);
  give_up(world[1], receive);
  MessageEngine::throw_if_failed(*send);
  MessageEngine::throw_if_failed(*receive);
  EXPECT_TRUE(got == sent);
  expect_idle(world);
}

TEST(MessageGivingUp, IsSeenByAReceiverThatSleeps) {
  MessageWorld world(2);
  const auto large = pattern(kLarge, 1);
  const auto send = world[0].send(1, 7, large);
  std::jthread receiver([&] {
    Buffer got(kLarge);
    EXPECT_THAT(error_of<MessageGivenUp>(
                    [&] { world[1].wait(world[1].receive(0, 7, got)); }),
                HasSubstr("rank 0 gave up"));
  });
  while (world[1].segment.state(1).message_sleepers == 0)
    std::this_thread::yield();
  give_up(world[0], send);
}

TEST(MessageGivingUp, OfAllThatIsUnderWayLeavesNoDataInUse) {
  MessageWorld world(2);
  const auto sent = pattern(kLarge, 1);
  const auto coming = world[1].send(0, 7, sent);
  Buffer in_the_middle(kLarge);
  Buffer not_begun(1);
  auto going = pattern(kLarge, 2);
  const std::vector<Handle> all{world[0].receive(1, 7, in_the_middle),
                                world[0].receive(1, 8, not_begun),
                                world[0].send(1, 7, going)};
  world[0].engine.end_all("the end");
  refill(in_the_middle);
  refill(not_begun);
  refill(going);
  for (const auto& message : all) {
    EXPECT_TRUE(message->ended);
    EXPECT_THAT(error_of<GroupBroken>(
                    [&] { MessageEngine::throw_if_failed(*message); }),
                HasSubstr("the end: a message "));
  }
  EXPECT_FALSE(world[0].engine.busy());
  const Buffer late{42};
  const auto message = world[1].send(0, 8, late);
  move_all(world);
  EXPECT_TRUE(is_refilled(in_the_middle));
  EXPECT_TRUE(is_refilled(not_begun));
}

}  // namespace
}  // namespace lockstep::internal::shm
