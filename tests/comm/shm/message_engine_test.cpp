#include "lockstep/comm/shm/protocol/message_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/comm/shm/message_world.h"
#include "tests/harness/asleep.h"

namespace lockstep::internal::shm {
namespace {

using internal::testing::await_asleep;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Buffer = std::vector<uint8_t>;
constexpr int kAny = Group::kAnySource;

TEST(MessageEngine, DeliversEveryByteOfEverySize) {
  MessageWorld world(2);
  const size_t ring = world[0].segment.ring_bytes();
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{17}, ring / 4 - 1,
        ring - 17, ring - 16, ring - 15, ring - 1, ring, ring + 1, 2 * ring + 3,
        size_t{5} << 20}) {
    SCOPED_TRACE(bytes);
    world.run([&](MessageRank& rank) {
      const int peer = 1 - rank.rank;
      for (int turn = 0; turn < 3; ++turn) {
        const auto sent = pattern(bytes, turn);
        Buffer got(bytes);
        if (rank.rank == 0) rank.wait(rank.send(peer, turn, sent));
        rank.wait(rank.receive(peer, turn, got));
        EXPECT_TRUE(got == sent);
        if (rank.rank == 1) rank.wait(rank.send(peer, turn, got));
      }
    });
  }
}

TEST(MessageEngine, WritesNothingBesideTheBuffer) {
  MessageWorld world(2);
  const auto sent = pattern(1001, 1);
  Buffer got(1003, 0xa5);
  world[0].send(1, 0, sent);
  const auto message = world[1].engine.start_receive(
      0, 0, {got.data() + 1, sent.size()}, DType::uint8);
  EXPECT_TRUE(world[1].engine.has_ended(*message));
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), got.begin() + 1));
  EXPECT_EQ(got.front(), 0xa5);
  EXPECT_EQ(got.back(), 0xa5);
}

TEST(MessageEngine, SendsToEachOtherAtOnceWithoutDeadlock) {
  MessageWorld world(2);
  world.run([](MessageRank& rank) {
    const auto sent = pattern(1 << 20, rank.rank);
    Buffer got(1 << 20);
    const auto send = rank.send(1 - rank.rank, 0, sent);
    const auto receive = rank.receive(1 - rank.rank, 0, got);
    // This rank's receive progresses meanwhile.
    rank.wait(send);
    rank.wait(receive);
    EXPECT_TRUE(got == pattern(1 << 20, 1 - rank.rank));
  });
}

TEST(MessageEngine, SmallSendEndsBeforeItIsReceived) {
  MessageWorld world(2);
  const auto sent = pattern(100, 1);
  const auto send = world[0].send(1, 0, sent);
  EXPECT_TRUE(world[0].engine.has_ended(*send));
}

TEST(MessageEngine, SenderOfMuchWaitsForTheReceiver) {
  MessageWorld world(2);
  const auto sent = pattern(world[0].segment.ring_bytes(), 1);
  const auto send = world[0].send(1, 0, sent);
  EXPECT_FALSE(world[0].engine.has_ended(*send));
  EXPECT_TRUE(world[0].engine.busy());
  Buffer got(sent.size());
  const auto receive = world[1].receive(0, 0, got);
  while (!world[1].engine.has_ended(*receive)) {
    EXPECT_TRUE(world[0].engine.drive() || world[1].engine.drive() ||
                receive->ended);
  }
  EXPECT_TRUE(world[0].engine.has_ended(*send));
  EXPECT_FALSE(world[0].engine.busy());
  EXPECT_FALSE(world[1].engine.busy());
  EXPECT_TRUE(got == sent);
}

TEST(MessageEngine, ReachesLaterTagsFirst) {
  for (const size_t bytes : {size_t{10}, size_t{1} << 20}) {
    MessageWorld world(2);
    world.run([&](MessageRank& rank) {
      if (rank.rank == 0) {
        std::vector<Buffer> sent;
        for (int tag = 0; tag < 5; ++tag) sent.push_back(pattern(bytes, tag));
        std::vector<std::shared_ptr<Message>> sends;
        for (int tag = 0; tag < 5; ++tag) {
          sends.push_back(rank.send(1, tag, sent[tag]));
        }
        for (const auto& send : sends) rank.wait(send);
      } else {
        for (const int tag : {3, 4, 0, 2, 1}) {
          Buffer got(bytes);
          rank.wait(rank.receive(0, tag, got));
          EXPECT_TRUE(got == pattern(bytes, tag)) << tag;
        }
      }
    });
  }
}

TEST(MessageEngine, KeepsMessagesOfOneTagInOrderAlsoWhenPutAside) {
  MessageWorld world(2);
  for (int i = 0; i < 4; ++i) {
    world[0].send(1, 7, Buffer{static_cast<uint8_t>(i)});
  }
  Buffer mark{99};
  world[0].send(1, 8, mark);
  Buffer got(1);
  world[1].wait(world[1].receive(0, 8, got));
  EXPECT_EQ(got[0], 99);
  for (int i = 4; i < 6; ++i) {
    world[0].send(1, 7, Buffer{static_cast<uint8_t>(i)});
  }
  for (int i = 0; i < 6; ++i) {
    world[1].wait(world[1].receive(i % 2 == 0 ? 0 : kAny, 7, got));
    EXPECT_EQ(got[0], i);
  }
}

TEST(MessageEngine, ReceivesMatchInTheOrderInWhichTheyWereStarted) {
  MessageWorld world(3);
  Buffer first(1);
  Buffer second(1);
  Buffer third(1);
  const auto any = world[0].receive(kAny, 1, first);
  const auto from_two = world[0].receive(2, 1, second);
  const auto any_again = world[0].receive(kAny, 1, third);
  world[2].send(0, 1, Buffer{20});
  world[2].send(0, 1, Buffer{21});
  world[0].wait(from_two);
  world[1].send(0, 1, Buffer{10});
  world[0].wait(any_again);
  EXPECT_EQ(first, Buffer{20});
  EXPECT_EQ(second, Buffer{21});
  EXPECT_EQ(third, Buffer{10});
  EXPECT_EQ(MessageEngine::source(*any), 2);
  EXPECT_EQ(MessageEngine::source(*any_again), 1);
}

TEST(MessageEngine, ReceivesFromAnySourceGetEachMessageOnce) {
  constexpr int kMessages = 50;
  MessageWorld world(5);
  world.run([](MessageRank& rank) {
    if (rank.rank != 0) {
      for (int i = 0; i < kMessages; ++i) {
        const Buffer sent{static_cast<uint8_t>(rank.rank),
                          static_cast<uint8_t>(i)};
        rank.wait(rank.send(0, 3, sent));
      }
      return;
    }
    std::vector<int> next(rank.size);
    for (int i = 0; i < kMessages * (rank.size - 1); ++i) {
      Buffer got(2);
      const auto receive = rank.receive(kAny, 3, got);
      rank.wait(receive);
      const int source = MessageEngine::source(*receive);
      EXPECT_EQ(got[0], source);
      EXPECT_EQ(got[1], next[source]++);
    }
    EXPECT_EQ(next, (std::vector<int>{0, 50, 50, 50, 50}));
  });
}

TEST(MessageEngine, ManySmallMessagesAtOnceStayInOrder) {
  constexpr int kMessages = 20'000;  // more than the ring holds
  MessageWorld world(2);
  world.run([](MessageRank& rank) {
    std::vector<uint32_t> values(kMessages);
    std::vector<std::shared_ptr<Message>> messages;
    for (int i = 0; i < kMessages; ++i) {
      if (rank.rank == 0) {
        values[i] = i * 7;
        messages.push_back(
            rank.engine.start_send(1, 0, {&values[i], 4}, DType::int32));
      } else {
        messages.push_back(
            rank.engine.start_receive(0, 0, {&values[i], 4}, DType::int32));
      }
    }
    for (const auto& message : messages) rank.wait(message);
    for (int i = 0; i < kMessages; ++i) ASSERT_EQ(values[i], uint32_t(i) * 7);
  });
}

TEST(MessageEngine, TellsBothSizesAndDtypesWhereTheyDiffer) {
  for (const bool aside : {false, true}) {
    MessageWorld world(2);
    const auto sent = pattern(12, 1);
    world[0].engine.start_send(1, 7, {sent.data(), 12}, DType::float32);
    world[0].engine.start_send(1, 7, {sent.data(), 12}, DType::float32);
    world[0].engine.start_send(1, 7, {sent.data(), 12}, DType::float32);
    world[0].send(1, 8, sent);
    Buffer got(12);
    if (aside) world[1].wait(world[1].receive(0, 8, got));
    Buffer wrong(16, 0xa5);
    const auto larger =
        world[1].engine.start_receive(0, 7, {wrong.data(), 16}, DType::float32);
    EXPECT_THAT(error_of<CallMismatch>([&] { world[1].wait(larger); }),
                AllOf(HasSubstr("rank 0"), HasSubstr("12 bytes of Float"),
                      HasSubstr("16 bytes of Float"), HasSubstr("tag 7")));
    const auto other =
        world[1].engine.start_receive(0, 7, {wrong.data(), 12}, DType::int32);
    EXPECT_THAT(error_of<CallMismatch>([&] { world[1].wait(other); }),
                AllOf(HasSubstr("bytes of Float"), HasSubstr("bytes of Int")));
    EXPECT_EQ(wrong, Buffer(16, 0xa5));
    // The next message arrives as usual.
    world[1].wait(
        world[1].engine.start_receive(0, 7, {got.data(), 12}, DType::float32));
    EXPECT_EQ(got, sent);
  }
}

TEST(MessageEngine, DropsALargeMessageOfAnotherSizeWhole) {
  MessageWorld world(2);
  world.run([](MessageRank& rank) {
    const auto large = pattern(1 << 20, 1);
    const Buffer small{42};
    Buffer got(1);
    if (rank.rank == 0) {
      rank.wait(rank.send(1, 0, large));
      rank.wait(rank.send(1, 0, small));
    } else {
      error_of<CallMismatch>([&] { rank.wait(rank.receive(0, 0, got)); });
      rank.wait(rank.receive(0, 0, got));
      EXPECT_EQ(got, small);
    }
  });
}

TEST(MessageEngine, WakesAThreadThatSleepsForAMessage) {
  MessageWorld world(2);
  std::atomic<pid_t> receiver{0};
  world.run([&](MessageRank& rank) {
    Buffer data{5};
    if (rank.rank == 0) {
      EXPECT_TRUE(await_asleep(receiver));
      rank.send(1, 0, data);
    } else {
      receiver = ::gettid();
      data[0] = 0;
      rank.wait(rank.receive(0, 0, data));
      EXPECT_EQ(data[0], 5);
    }
  });
}

TEST(MessageEngine, ThreadsOfOneRankDriveForEachOther) {
  constexpr int kThreads = 3;
  MessageWorld world(2);
  world.run([](MessageRank& rank) {
    std::vector<std::jthread> threads;
    for (int tag = 0; tag < kThreads; ++tag) {
      threads.emplace_back([&rank, tag] {
        for (int turn = 0; turn < 100; ++turn) {
          const auto sent = pattern(turn * 100, tag * 1000 + turn);
          Buffer got(sent.size());
          if (rank.rank == 0) rank.wait(rank.send(1, tag, sent));
          rank.wait(rank.receive(1 - rank.rank, tag, got));
          EXPECT_TRUE(got == sent);
          if (rank.rank == 1) rank.wait(rank.send(0, tag, got));
        }
      });
    }
  });
}

TEST(MessageEngine, ServesMessagesThatNobodyWaitsFor) {
  MessageWorld world(2);
  world.run([](MessageRank& rank) {
    std::jthread server([&](std::stop_token stop) { rank.engine.serve(stop); });
    for (int turn = 0; turn < 5; ++turn) {
      const auto sent = pattern(1 << 20, rank.rank + 10 * turn);
      Buffer got(sent.size());
      const auto send = rank.send(1 - rank.rank, turn, sent);
      // The server sleeps for the first message in one turn, for any message in
      // the next.
      if (turn % 2 == 1) std::this_thread::sleep_for(5ms);
      const auto receive = rank.receive(1 - rank.rank, turn, got);
      while (!send->ended || !receive->ended) std::this_thread::yield();
      EXPECT_TRUE(got == pattern(1 << 20, 1 - rank.rank + 10 * turn));
    }
  });
}

TEST(MessageEngine, KeepsAMessageThatItsUserHasDropped) {
  MessageWorld world(2);
  const auto sent = pattern(1 << 20, 1);
  world[0].send(1, 0, sent);
  Buffer got(sent.size());
  auto receive = world[1].receive(0, 0, got);
  while (world[0].engine.drive() || world[1].engine.drive()) {
  }
  EXPECT_TRUE(receive->ended);
  EXPECT_TRUE(got == sent);
}

TEST(MessageEngine, RefusesAPeerThatIsNone) {
  MessageWorld world(2);
  Buffer data(1);
  EXPECT_THAT(
      error_of<std::invalid_argument>([&] { world[0].send(2, 0, data); }),
      AllOf(HasSubstr("to = 2"), HasSubstr("group of 2")));
  EXPECT_THAT(
      error_of<std::invalid_argument>([&] { world[0].send(0, 0, data); }),
      HasSubstr("to = 0 is this rank itself"));
  EXPECT_THAT(
      error_of<std::invalid_argument>([&] { world[0].receive(-2, 0, data); }),
      HasSubstr("from = -2"));
  MessageWorld alone(1);
  EXPECT_THAT(
      error_of<std::invalid_argument>([&] { alone[0].receive(kAny, 0, data); }),
      HasSubstr("no other rank"));
}

TEST(MessageDepartures, DeliverWhatWasWrittenBefore) {
  for (const bool dies : {false, true}) {
    MessageWorld world(3);
    // There are more messages than one drive() moves.
    for (int i = 0; i < 100; ++i) {
      world[1].wait(world[1].send(0, i % 2, Buffer{static_cast<uint8_t>(i)}));
    }
    dies ? world[1].die() : world[1].leave();
    Buffer got(1);
    for (const int odd : {1, 0}) {
      for (int i = odd; i < 100; i += 2) {
        world[0].wait(world[0].receive(i % 3 == 0 ? kAny : 1, odd, got));
        EXPECT_EQ(got[0], i);
      }
    }
    const auto more = world[0].receive(1, 0, got);
    EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(more); }),
                AllOf(HasSubstr(dies ? "rank 1 died" : "rank 1 has left"),
                      HasSubstr("tag 0, 1 bytes"), HasSubstr("did not come")));
  }
}

TEST(MessageDepartures, DeliverWhatWasWrittenToWhoOnlyAsks) {
  MessageWorld world(2);
  // One drive() does not reach the last message.
  for (int i = 0; i < 100; ++i) world[1].wait(world[1].send(0, 0, Buffer{1}));
  world[1].wait(world[1].send(0, 1, Buffer{9}));
  world[1].die();
  Buffer got(1);
  const auto last = world[0].receive(1, 1, got);
  EXPECT_TRUE(world[0].engine.has_ended(*last));
  MessageEngine::throw_if_failed(*last);
  EXPECT_EQ(got[0], 9);
}

TEST(MessageDepartures, FailWhatIsUnderWayWithThemOnly) {
  MessageWorld world(3);
  const auto large = pattern(1 << 20, 1);
  const auto to_dead = world[0].send(1, 0, large);
  const Buffer small{1};
  const auto behind = world[0].send(1, 1, small);
  const auto to_living = world[0].send(2, 0, large);
  Buffer got(1);
  Buffer from_living(1);
  const auto from_dead = world[0].receive(1, 5, got);
  const auto from_any = world[0].receive(kAny, 6, from_living);
  world[1].die();
  EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(from_dead); }),
              HasSubstr("rank 1 died"));
  for (const auto& send : {to_dead, behind}) {
    EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(send); }),
                AllOf(HasSubstr("rank 1 died"), HasSubstr("was not taken")));
  }
  EXPECT_THAT(
      error_of<GroupBroken>([&] { world[0].wait(world[0].send(1, 0, got)); }),
      HasSubstr("rank 1 died"));
  std::jthread peer([&] {
    Buffer all(large.size());
    world[2].wait(world[2].receive(0, 0, all));
    EXPECT_TRUE(all == large);
    world[2].wait(world[2].send(0, 6, Buffer{9}));
    world[2].leave();
  });
  world[0].wait(to_living);
  world[0].wait(from_any);
  EXPECT_EQ(from_living[0], 9);
  // No peer is left now.
  EXPECT_THAT(error_of<GroupBroken>(
                  [&] { world[0].wait(world[0].receive(kAny, 6, got)); }),
              AllOf(HasSubstr("rank 1 died"), HasSubstr("rank 2 has left")));
}

TEST(MessageDepartures, CutAMessageOffAndTellHowFarItCame) {
  for (const int tag : {0, 1}) {  // 1: is put aside
    MessageWorld world(2);
    const auto large = pattern(1 << 20, 1);
    const auto send = world[1].send(0, 0, large);
    Buffer got(large.size());
    const auto receive = world[0].receive(1, tag, got);
    world[1].die();
    const auto words = error_of<GroupBroken>([&] { world[0].wait(receive); });
    EXPECT_THAT(words, HasSubstr("rank 1 died"));
    EXPECT_THAT(words, HasSubstr(tag == 0 ? "did not come, except for "
                                          : "did not come"));
    EXPECT_FALSE(world[0].engine.busy());
  }
}

// Rank 1 could not go on without rank 2, and ended, too. Rank 0, which waits
// for rank 1 only, must not blame it.
TEST(MessageDepartures, BecauseOfAnotherRankNameThatRank) {
  for (const bool normally : {false, true}) {
    MessageWorld world(3);
    Buffer got(1);
    const auto receive = world[0].receive(1, 0, got);
    world[1].waiting.keep_cause("rank 2 died");
    world[1].waiting.keep_cause("rank 0 died");  // the first cause counts
    if (normally) {
      world[1].leave();
    } else {
      world[1].die();
    }
    const auto words = error_of<GroupBroken>([&] { world[0].wait(receive); });
    EXPECT_THAT(words, HasSubstr("rank 2 died: a message from rank 1"));
    EXPECT_THAT(words, Not(HasSubstr("rank 1 died")));
    EXPECT_THAT(words, Not(HasSubstr("left")));
  }
}

TEST(MessageDepartures, AfterACauseWasKeptTellWhatBrokeTheGroup) {
  MessageWorld world(3);
  Buffer got(1);
  const auto receive = world[0].receive(1, 0, got);
  world[1].waiting.keep_cause("rank 2 died");
  world[1].waiting.break_down("out of patience");
  world[1].waiting.keep_cause("rank 2 died");
  EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(receive); }),
              HasSubstr("rank 1 failed: out of patience"));
}

// While a rank lives, what it has kept is nobody's business.
TEST(MessageDepartures, AreNotMadeByACauseThatIsKept) {
  MessageWorld world(2);
  Buffer got(1);
  const Buffer given{7};
  world[1].waiting.keep_cause("rank 3 died");
  EXPECT_TRUE(world[0].waiting.departures().empty());
  const auto receive = world[0].receive(1, 0, got);
  world[1].send(0, 0, given);
  world[0].wait(receive);
  EXPECT_EQ(got, given);
}

TEST(MessageDepartures, OfARankThatSaysTheGroupIsBrokenEndAllMessages) {
  MessageWorld world(3);
  Buffer got(1);
  const auto receive = world[0].receive(2, 0, got);
  std::jthread failing([&, waiting = ::gettid()] {
    EXPECT_TRUE(await_asleep(waiting));
    world[1].waiting.break_down("out of patience");
  });
  EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(receive); }),
              HasSubstr("rank 1 failed: out of patience"));
  while (!world[1].waiting.broken()) std::this_thread::yield();
  EXPECT_THAT(error_of<GroupBroken>([&] { world[1].send(0, 0, got); }),
              HasSubstr("out of patience"));
}

TEST(MessageDepartures, OfThisRankEndTheWaitsOfItsThreads) {
  MessageWorld world(2);
  Buffer got(1);
  const auto receive = world[0].receive(1, 0, got);
  std::jthread closing([&, waiting = ::gettid()] {
    EXPECT_TRUE(await_asleep(waiting));
    world[0].waiting.break_down("the process group was closed");
  });
  EXPECT_THAT(error_of<GroupBroken>([&] { world[0].wait(receive); }),
              HasSubstr("the process group was closed"));
}

TEST(MessageDepartures, AreSeenByTheServerAndByHasEnded) {
  for (const bool served : {true, false}) {
    MessageWorld world(2);
    Buffer got(1);
    std::jthread server([&](std::stop_token stop) {
      if (served) world[0].engine.serve(stop);
    });
    const auto receive = world[0].receive(1, 0, got);
    world[1].die();
    while (!(served ? receive->ended.load()
                    : world[0].engine.has_ended(*receive))) {
      std::this_thread::yield();
    }
    EXPECT_THAT(error_of<GroupBroken>(
                    [&] { MessageEngine::throw_if_failed(*receive); }),
                HasSubstr("rank 1 died"));
  }
}

}  // namespace
}  // namespace lockstep::internal::shm
