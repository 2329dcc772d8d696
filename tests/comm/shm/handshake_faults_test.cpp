#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <future>
#include <thread>

#include "lockstep/comm/shm/protocol/handshake.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "tests/comm/shm/meeting_place.h"

namespace lockstep::internal::shm::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

class HandshakeFault : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(open_descriptors(), before_); }

  // Runs each meeting in a thread and returns how it ended.
  std::vector<std::string> outcomes(const std::vector<Meeting>& meetings) {
    std::vector<std::future<std::string>> ranks;
    for (const auto& meeting : meetings) {
      ranks.push_back(std::async(std::launch::async, [this, &meeting] {
        return outcome_of([&] { meet(place_.exchange(), meeting); });
      }));
    }
    std::vector<std::string> texts;
    for (auto& rank : ranks) texts.push_back(rank.get());
    return texts;
  }

  // Does the same in processes; `prepare` runs first in the process of rank
  // `prepared`.
  std::vector<std::string> outcomes_of_processes(
      const std::vector<Meeting>& meetings, int prepared,
      const std::function<void()>& prepare) {
    std::vector<Process> ranks;
    for (const auto& meeting : meetings) {
      ranks.emplace_back([&, meeting] {
        if (meeting.rank == prepared) prepare();
        return outcome_of([&] { meet(place_.exchange(), meeting); });
      });
    }
    std::vector<std::string> texts;
    for (auto& rank : ranks) texts.push_back(rank.result());
    return texts;
  }

  const size_t before_ = open_descriptors();
  MeetingPlace place_;
};

void limit(int resource, rlim_t amount) {
  rlimit limits{.rlim_cur = amount, .rlim_max = amount};
  if (::setrlimit(static_cast<__rlimit_resource>(resource), &limits) != 0) {
    throw_errno("setrlimit");
  }
}

TEST_F(HandshakeFault, AnAbsentRankIsNamedAtTheDeadline) {
  auto zero = meeting_of(0, 3);
  auto one = meeting_of(1, 3);
  zero.timeout = one.timeout = 300ms;
  zero.global_ranks = one.global_ranks = {4, 5, 6};
  EXPECT_THAT(
      outcomes({zero, one}),
      Each(AllOf(StartsWith("GroupBroken: rank 6 has not come"),
                 HasSubstr(" of 300 ms"), Not(HasSubstr("rank 5 has not")))));
}

TEST_F(HandshakeFault, AnAbsentRankZeroIsNamedAtTheDeadline) {
  auto one = meeting_of(1, 2);
  one.timeout = 100ms;
  EXPECT_THAT(outcomes({one}),
              ElementsAre(AllOf(StartsWith("GroupBroken: rank 0 has not come"),
                                HasSubstr(" of 100 ms"))));
}

TEST_F(HandshakeFault, DifferentSizesAreAnErrorThatNamesBoth) {
  EXPECT_THAT(outcomes({meeting_of(0, 2), meeting_of(1, 3)}),
              Each(AllOf(StartsWith("invalid_argument: rank "),
                         HasSubstr("one of 2"), HasSubstr("one of 3"))));
}

TEST_F(HandshakeFault, TwoOfOneRankAreAnErrorThatNamesIt) {
  EXPECT_THAT(outcomes({meeting_of(0, 3), meeting_of(1, 3), meeting_of(1, 3)}),
              Each(AllOf(StartsWith("invalid_argument: "),
                         HasSubstr("call themselves rank 1"))));
}

TEST_F(HandshakeFault, AWrongTuningOfRankZeroIsEveryRanksError) {
  auto zero = meeting_of(0, 2);
  zero.tuning.chunk_bytes = 5000;
  EXPECT_THAT(outcomes({zero, meeting_of(1, 2)}),
              Each(AllOf(StartsWith("invalid_argument: rank 0: chunk_bytes"),
                         HasSubstr("5000"))));
}

TEST_F(HandshakeFault, ARankOfAnotherNetworkNamespaceIsUnavailableForAll) {
  Process probe([] {
    return std::string(::unshare(CLONE_NEWNET) == 0 ? "can" : "cannot");
  });
  if (probe.result() != "can") {
    GTEST_SKIP() << "no right to make a network namespace";
  }
  EXPECT_THAT(outcomes_of_processes(
                  {meeting_of(0, 3), meeting_of(1, 3), meeting_of(2, 3)}, 1,
                  [] {
                    if (::unshare(CLONE_NEWNET) != 0) throw_errno("unshare");
                  }),
              Each(AllOf(StartsWith("Unavailable: "), HasSubstr("rank 1"),
                         HasSubstr("differ in host"))));
}

TEST_F(HandshakeFault, ARankOfAnotherUserIsUnavailableForAll) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  EXPECT_THAT(outcomes_of_processes({meeting_of(0, 2), meeting_of(1, 2)}, 1,
                                    [] {
                                      if (::setuid(65534) != 0)
                                        throw_errno("setuid");
                                    }),
              Each(AllOf(StartsWith("Unavailable: "),
                         HasSubstr("rank 0 and rank 1 differ in host"))));
}

TEST_F(HandshakeFault, MemoryThatRankZeroCannotReserveIsUnavailableForAll) {
  EXPECT_THAT(outcomes_of_processes(
                  {meeting_of(0, 3), meeting_of(1, 3), meeting_of(2, 3)}, 0,
                  [] { limit(RLIMIT_FSIZE, 65536); }),
              Each(StartsWith("Unavailable: rank 0: could not make ")));
}

TEST_F(HandshakeFault, MemoryThatARankCannotMapIsUnavailableForAll) {
  std::vector<Meeting> meetings;
  for (int rank = 0; rank < 3; ++rank) {
    meetings.push_back(meeting_of(rank, 3));
    meetings.back().tuning.chunk_bytes = 16 << 20;
  }
  EXPECT_THAT(outcomes_of_processes(
                  meetings, 1,
                  [] {
                    size_t pages = 0;
                    std::ifstream("/proc/self/statm") >> pages;
                    limit(RLIMIT_AS, pages * ::getpagesize() + (16 << 20));
                  }),
              Each(StartsWith("Unavailable: rank 1: could not map ")));
}

TEST_F(HandshakeFault, ADescriptorThatFindsNoRoomIsUnavailableForAll) {
  Process one([&] {
    auto exchange = place_.exchange();
    exchange.set = [set = exchange.set](const std::string& key,
                                        const std::string& value) {
      set(key, value);
      // The segment's descriptor arrives later, and finds no free number.
      const FileDescriptor lowest_free(::dup(STDERR_FILENO));
      limit(RLIMIT_NOFILE, lowest_free.get());
    };
    return outcome_of([&] { meet(exchange, meeting_of(1, 2)); });
  });
  const auto text = AllOf(StartsWith("Unavailable: rank 1: "),
                          HasSubstr("Too many open files"));
  EXPECT_THAT(outcomes({meeting_of(0, 2)}), ElementsAre(text));
  EXPECT_THAT(one.result(), text);
}

TEST_F(HandshakeFault, ARankKilledMeanwhileIsNamedAtOnce) {
  // Rank 2 does not come before rank 1 is dead. The deadline is a minute away,
  // and its error would name rank 2.
  Process zero([&] {
    return outcome_of([&] { meet(place_.exchange(), meeting_of(0, 3)); });
  });
  Process one([&] {
    return outcome_of([&] { meet(place_.exchange(), meeting_of(1, 3)); });
  });
  place_.get("shm/1");
  one.kill();
  const auto text = StartsWith("GroupBroken: rank 1 died or left");
  EXPECT_THAT(zero.result(), text);
  EXPECT_THAT(outcomes({meeting_of(2, 3)}), ElementsAre(text));
}

TEST_F(HandshakeFault, RankZeroKilledMeanwhileIsNamedAtOnce) {
  Process zero([&] {
    return outcome_of([&] { meet(place_.exchange(), meeting_of(0, 3)); });
  });
  Process one([&] {
    return outcome_of([&] { meet(place_.exchange(), meeting_of(1, 3)); });
  });
  place_.get("shm/1");
  zero.kill();
  const auto text = StartsWith("GroupBroken: rank 0 died or left");
  EXPECT_THAT(one.result(), text);
  EXPECT_THAT(outcomes({meeting_of(2, 3)}), ElementsAre(text));
}

TEST_F(HandshakeFault, AStoreThatFailsEndsTheMeetingAtOnce) {
  auto exchange = place_.exchange();
  exchange.get = [](const std::string&,
                    std::chrono::milliseconds) -> std::optional<std::string> {
    throw std::runtime_error("connection reset");
  };
  EXPECT_THAT(
      outcome_of([&] { meet(exchange, meeting_of(1, 2)); }),
      AllOf(StartsWith("GroupBroken: rank 1 could not read from the store"),
            HasSubstr("connection reset")));
}

TEST(PeerLinks, AKilledPeerHasHungUpAlthoughItsMessageWaits) {
  MeetingPlace place;
  Process one([&] {
    const auto member = meet(place.exchange(), meeting_of(1, 2));
    const auto memory = SharedMemory::create(4096);
    member.links->lend(0, 7, memory);
    place.exchange().set("lent", "");
    ::pause();
    return std::string();
  });
  const auto member = meet(place.exchange(), meeting_of(0, 2));
  place.get("lent");
  EXPECT_THAT(member.links->hung_up(), IsEmpty());
  one.kill();
  EXPECT_THAT(member.links->hung_up(), ElementsAre(1));
  const auto loan = member.links->receive(1);
  ASSERT_TRUE(loan.has_value());
  EXPECT_EQ(loan->id, 7u);
  EXPECT_FALSE(member.links->receive(1).has_value());
}

TEST(PeerLinks, AKilledPeerThatHadNotReadLeavesItsOwnMessages) {
  MeetingPlace place;
  Process one([&] {
    const auto member = meet(place.exchange(), meeting_of(1, 2));
    member.links->take_back(0, 7);
    place.exchange().set("sent", "");
    ::pause();
    return std::string();
  });
  const auto member = meet(place.exchange(), meeting_of(0, 2));
  place.get("sent");
  ASSERT_TRUE(member.links->take_back(1, 8));
  one.kill();
  EXPECT_THAT(member.links->hung_up(), ElementsAre(1));
  const auto loan = member.links->receive(1);
  ASSERT_TRUE(loan.has_value());
  EXPECT_EQ(loan->id, 7u);
  EXPECT_FALSE(member.links->receive(1).has_value());
  EXPECT_TRUE(member.links->take_back(1, 9));
}

TEST(PeerLinks, WhoHangsUpIsSeenByAllOthers) {
  MeetingPlace place;
  const auto members = meet_in_threads(place, 3);
  members[1].links->hang_up();
  EXPECT_THAT(members[0].links->hung_up(), ElementsAre(1));
  EXPECT_THAT(members[2].links->hung_up(), ElementsAre(1));
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
