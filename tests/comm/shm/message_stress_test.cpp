#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "lockstep/comm/shm/protocol/message_engine.h"
#include "tests/comm/shm/message_world.h"

namespace lockstep::internal::shm {
namespace {

constexpr int kTags = 3;
// Messages with this tag are received from any source. They all have one size,
// because any of them may come next.
constexpr int kAnyTag = kTags;
constexpr size_t kAnyBytes = 100;

struct Planned {
  int from;
  int to;
  int tag;
  size_t bytes;
  uint64_t seed;
};

// Returns the same on all ranks.
std::vector<Planned> plan(int size, int messages, std::mt19937_64& rng) {
  std::vector<Planned> all;
  for (int i = 0; i < messages; ++i) {
    const int from = static_cast<int>(rng() % size);
    const int to = static_cast<int>((from + 1 + rng() % (size - 1)) % size);
    const int tag = static_cast<int>(rng() % (kTags + 1));
    size_t bytes = rng() % 200;
    if (rng() % 10 == 0) bytes = rng() % 20'000;
    if (rng() % 50 == 0) bytes = rng() % 600'000;
    if (tag == kAnyTag) bytes = kAnyBytes;
    all.push_back({from, to, tag, bytes, rng()});
  }
  return all;
}

struct Side {
  const Planned* planned;
  std::vector<uint8_t> data{};
  std::shared_ptr<Message> message{};
};

// Starts this rank's sends and receives in an order of its own, waits for them
// in another order, and compares all data that came.
void take_part(MessageRank& rank, const std::vector<Planned>& all,
               uint64_t seed) {
  std::mt19937_64 rng(seed + rank.rank);
  std::vector<Side> sends;
  std::vector<std::vector<Side>> receives(rank.size * (kTags + 1));
  std::vector<int> order;  // the next queue to use; -1 for the sends
  for (const auto& one : all) {
    if (one.from == rank.rank) {
      sends.push_back({.planned = &one, .data = pattern(one.bytes, one.seed)});
      order.push_back(-1);
    } else if (one.to == rank.rank) {
      const int queue = one.from * (kTags + 1) + one.tag;
      receives[queue].push_back(
          {.planned = &one, .data = std::vector<uint8_t>(one.bytes)});
      order.push_back(queue);
    }
  }
  std::ranges::shuffle(order, rng);
  std::vector<size_t> next(receives.size());
  size_t next_send = 0;
  std::vector<Side*> started;
  for (const int queue : order) {
    Side& side =
        queue < 0 ? sends[next_send++] : receives[queue][next[queue]++];
    const auto& one = *side.planned;
    if (queue < 0) {
      side.message = rank.send(one.to, one.tag, side.data);
    } else {
      side.message =
          rank.receive(one.tag == kAnyTag ? Group::kAnySource : one.from,
                       one.tag, side.data);
    }
    started.push_back(&side);
    if (rng() % 4 == 0) {
      rank.engine.has_ended(*started[rng() % started.size()]->message);
    }
    if (rng() % 64 == 0) std::this_thread::yield();
  }
  // Receives from any source get their messages in the order of starting.
  std::vector<Side*> from_any;
  for (Side* side : started) {
    if (side->planned->to == rank.rank && side->planned->tag == kAnyTag) {
      from_any.push_back(side);
    }
  }
  std::ranges::shuffle(started, rng);
  for (Side* side : started) rank.wait(side->message);

  std::vector<size_t> seen(rank.size);
  for (Side* side : from_any) {
    const int source = MessageEngine::source(*side->message);
    const auto& queue = receives[source * (kTags + 1) + kAnyTag];
    ASSERT_LT(seen[source], queue.size());
    const auto& one = *queue[seen[source]++].planned;
    EXPECT_TRUE(side->data == pattern(one.bytes, one.seed));
  }
  for (const auto& queue : receives) {
    for (const Side& side : queue) {
      const auto& one = *side.planned;
      if (one.tag == kAnyTag) continue;
      EXPECT_EQ(MessageEngine::source(*side.message), one.from);
      EXPECT_TRUE(side.data == pattern(one.bytes, one.seed))
          << "from " << one.from << ", tag " << one.tag;
    }
  }
  EXPECT_FALSE(rank.engine.busy());
}

class MessageStress : public testing::TestWithParam<int> {};

TEST_P(MessageStress, EveryByteOfARandomMixArrives) {
  const int size = GetParam();
  MessageWorld world(size);
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    const auto all = plan(size, 300 * size, rng);
    world.run([&](MessageRank& rank) { take_part(rank, all, seed * 100); });
  }
}

TEST_P(MessageStress, AServerAndWaitingThreadsDriveTogether) {
  const int size = GetParam();
  MessageWorld world(size);
  std::mt19937_64 rng(9);
  const auto all = plan(size, 300 * size, rng);
  std::vector<std::jthread> servers;
  for (int rank = 0; rank < size; ++rank) {
    servers.emplace_back([&world, rank](std::stop_token stop) {
      world[rank].engine.serve(stop);
    });
  }
  world.run([&](MessageRank& rank) { take_part(rank, all, 1); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, MessageStress, testing::Values(2, 3, 5),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace lockstep::internal::shm
