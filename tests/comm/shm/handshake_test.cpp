#include "lockstep/comm/shm/protocol/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <future>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/handshake_note.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "tests/comm/shm/meeting_place.h"

namespace lockstep::internal::shm::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// No case may leave a descriptor open.
class Handshake : public ::testing::TestWithParam<int> {
 protected:
  void TearDown() override { EXPECT_EQ(open_descriptors(), before_); }
  const size_t before_ = open_descriptors();
};
using HandshakeOf = Handshake;

TEST_P(HandshakeOf, AllRanksMapTheSameMemory) {
  const int size = GetParam();
  MeetingPlace place;
  const auto members = meet_in_threads(place, size);
  const auto bytes = Segment::bytes(size, members[0].meeting.tuning);
  for (int rank = 0; rank < size; ++rank) {
    ASSERT_EQ(members[rank].segment->size(), bytes);
    EXPECT_EQ(members[rank].segment->descriptor(), -1);  // not kept open
    members[rank].segment->bytes()[4096 + rank] = std::byte(rank + 1);
    members[rank].segment->bytes()[bytes - 1 - rank] = std::byte(rank + 101);
  }
  for (const auto& member : members) {
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(member.segment->bytes()[4096 + rank], std::byte(rank + 1));
      EXPECT_EQ(member.segment->bytes()[bytes - 1 - rank],
                std::byte(rank + 101));
    }
  }
}

TEST_P(HandshakeOf, EachLinkLeadsToItsRank) {
  const int size = GetParam();
  MeetingPlace place;
  const auto members = meet_in_threads(place, size);
  for (int from = 0; from < size; ++from) {
    EXPECT_THAT(members[from].links->hung_up(), IsEmpty());
    for (int to = 0; to < size; ++to) {
      if (from == to) continue;
      ASSERT_TRUE(members[from].links->take_back(to, 100 * from + to));
    }
  }
  for (int to = 0; to < size; ++to) {
    for (int from = 0; from < size; ++from) {
      if (from == to) continue;
      const auto got = members[to].links->receive(from);
      ASSERT_TRUE(got.has_value());
      EXPECT_EQ(got->id, 100u * from + to);
      EXPECT_FALSE(members[to].links->receive(from).has_value());
    }
  }
}

TEST_P(HandshakeOf, EveryRankFindsTheCoresOfAllOthers) {
  const int size = GetParam();
  std::array<uint64_t, 16> own{};
  ASSERT_EQ(::sched_getaffinity(0, sizeof own,
                                reinterpret_cast<cpu_set_t*>(own.data())),
            0);
  MeetingPlace place;
  const auto members = meet_in_threads(place, size);
  for (const auto& member : members) {
    const Segment segment(member.segment, size, member.meeting.tuning);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(segment.state(rank).cores, own) << "of rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, HandshakeOf, ::testing::Values(1, 2, 3, 8));

TEST_F(Handshake, ProcessesReadWhatTheOthersWrote) {
  MeetingPlace place;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&place, rank] {
      const auto member = meet(place.exchange(), meeting_of(rank, 3));
      const Segment segment(member.segment, 3, member.meeting.tuning);
      segment.state(rank).staged.store(rank + 7);
      const auto deadline = Deadline::after(20s);
      std::string seen;
      for (int other = 0; other < 3; ++other) {
        while (segment.state(other).staged.load() == 0) {
          if (deadline.expired()) return std::string("nothing came");
          std::this_thread::sleep_for(1ms);
        }
        seen += std::to_string(segment.state(other).staged.load()) + " ";
      }
      return seen;
    });
  }
  for (auto& rank : ranks) EXPECT_EQ(rank.result(), "7 8 9 ");
}

TEST_F(Handshake, TuningIsThatOfRankZero) {
  MeetingPlace place;
  auto first = meeting_of(0, 2);
  first.tuning = {
      .one_shot_bytes = 512, .chunk_bytes = 8192, .streaming_bytes = 12345};
  auto zero = std::async(std::launch::async,
                         [&] { return meet(place.exchange(), first); });
  const auto one = meet(place.exchange(), meeting_of(1, 2));
  EXPECT_EQ(one.meeting.tuning.one_shot_bytes, 512u);
  EXPECT_EQ(one.meeting.tuning.chunk_bytes, 8192u);
  EXPECT_EQ(one.meeting.tuning.streaming_bytes, 12345u);
  EXPECT_EQ(one.meeting.rank, 1);
  zero.get();
}

TEST_F(Handshake, NothingOfTheMemoryHasAName) {
  MeetingPlace place;
  const auto members = meet_in_threads(place, 2);
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("lockstep")));
  }
}

TEST_F(Handshake, RanksThatCannotBeAreRefused) {
  MeetingPlace place;
  for (const auto& [rank, size] :
       {std::pair(-1, 2), std::pair(2, 2), std::pair(0, 0), std::pair(0, 65)}) {
    EXPECT_THAT(
        outcome_of([&] { meet(place.exchange(), meeting_of(rank, size)); }),
        StartsWith("invalid_argument: rank " + std::to_string(rank) + " of"));
  }
}

TEST_F(Handshake, IdentityIsTheSameTwiceAndInAChild) {
  EXPECT_EQ(host_identity(), host_identity());
  Process child([] { return host_identity(); });
  EXPECT_EQ(child.result(), host_identity());
}

// A process that has found the socket's abstract name, which /proc/net/unix
// shows.
class Stranger {
 public:
  explicit Stranger(const std::string& name) : socket_(connect_to(name)) {}

  void say(std::span<const std::byte> bytes) {
    ASSERT_EQ(send_packet(socket_, bytes), Sent::all);
  }
  void say(const Note& note) { say(std::as_bytes(std::span(&note, 1))); }
  // Returns "" while it is connected, else "dropped" or "answered".
  std::string outcome(std::chrono::milliseconds allowed) {
    pollfd polled{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(allowed.count())) == 0) return "";
    std::array<std::byte, 2048> bytes{};
    return receive_packet(socket_, bytes).state == Packet::State::hung_up
               ? "dropped"
               : "answered";
  }

 private:
  FileDescriptor socket_;
};

Note hello_of(int rank, int size, const std::string& secret) {
  Note note{};
  note.magic = kHandshakeMagic;
  note.version = kHandshakeVersion;
  std::copy_n(secret.begin(), note.secret.size(), note.secret.begin());
  note.kind = Kind::hello;
  note.rank = rank;
  note.size = size;
  return note;
}

class HandshakeStranger : public Handshake {
 protected:
  // Rank 0 waits, then `strange` runs, then rank 1 comes.
  template <typename Strange>
  void meet_in_spite_of(Strange strange) {
    MeetingPlace place;
    auto zero = std::async(std::launch::async, [&] {
      return outcome_of([&] { meet(place.exchange(), meeting_of(0, 2)); });
    });
    strange(place);
    EXPECT_EQ(outcome_of([&] { meet(place.exchange(), meeting_of(1, 2)); }),
              "met");
    EXPECT_EQ(zero.get(), "met");
  }
};

TEST_F(HandshakeStranger, WithAnotherSecretIsDropped) {
  meet_in_spite_of([](const MeetingPlace& place) {
    Stranger stranger(place.socket_of(0));
    auto secret = place.get("shm/secret");
    secret.back() = secret.back() == '0' ? '1' : '0';
    stranger.say(hello_of(1, 2, secret));
    EXPECT_EQ(stranger.outcome(20s), "dropped");
  });
}

TEST_F(HandshakeStranger, WithTheSecretIsAnswered) {
  // Shows what the previous case would see if the secret did not count.
  MeetingPlace place;
  auto zero = std::async(std::launch::async, [&] {
    return outcome_of([&] { meet(place.exchange(), meeting_of(0, 2)); });
  });
  {
    Stranger stranger(place.socket_of(0));
    stranger.say(hello_of(1, 2, place.get("shm/secret")));
    EXPECT_EQ(stranger.outcome(20s), "answered");
  }
  EXPECT_THAT(zero.get(), StartsWith("GroupBroken: rank 1 died or left"));
}

TEST_F(HandshakeStranger, ThatSpeaksGarbageIsDropped) {
  meet_in_spite_of([](const MeetingPlace& place) {
    const std::array<std::byte, 3> few{};
    const std::array<std::byte, 9000> many{};
    for (std::span<const std::byte> bytes :
         {std::span<const std::byte>(few), std::span<const std::byte>(many)}) {
      Stranger stranger(place.socket_of(0));
      stranger.say(bytes);
      EXPECT_EQ(stranger.outcome(20s), "dropped");
    }
  });
}

TEST_F(HandshakeStranger, ThatSaysNothingKeepsNobodyOut) {
  std::vector<Stranger> silent;
  meet_in_spite_of([&](const MeetingPlace& place) {
    // The number is more than the connections that are waited for at once.
    for (int i = 0; i < 300; ++i) silent.emplace_back(place.socket_of(0));
  });
}

TEST_F(HandshakeStranger, OfAnotherUserIsDropped) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  MeetingPlace place;
  Process other([&] {
    const auto name = place.socket_of(0);
    const auto secret = place.get("shm/secret");
    if (::setuid(65534) != 0) return std::string("setuid failed");
    Stranger stranger(name);
    stranger.say(hello_of(1, 2, secret));
    return stranger.outcome(20s);
  });
  auto zero = std::async(std::launch::async, [&] {
    return outcome_of([&] { meet(place.exchange(), meeting_of(0, 2)); });
  });
  EXPECT_EQ(other.result(), "dropped");
  EXPECT_EQ(outcome_of([&] { meet(place.exchange(), meeting_of(1, 2)); }),
            "met");
  EXPECT_EQ(zero.get(), "met");
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
