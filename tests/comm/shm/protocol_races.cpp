// Ranks as threads over one mapping, compiled with ThreadSanitizer: a read
// without the memory order that it needs is a race. This is a program of its
// own, which protocol_tsan_test.cpp starts.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/shm/bucket_rounds.h"
#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

constexpr milliseconds kTimeout{50'000};
constexpr size_t kLargest = 40'000;

const Values& values() {
  static const Values all(20'260'102, kLargest);
  return all;
}

// Returns every operation at sizes for every algorithm; the last chunk is
// whole, short, or three quarters long.
std::vector<Call> calls_of_all_kinds(int size) {
  const size_t chunk = small_tuning().chunk_bytes / sizeof(float);
  std::vector<Call> calls;
  for (size_t count : {size_t{0}, size_t{5}, size_t{8}, size_t{20}, size_t{64},
                       size_t{65}, chunk / 2, 2 * chunk, 2 * chunk + 3,
                       2 * chunk + chunk * 3 / 4, 4 * chunk + 1}) {
    for (int o = 0; o < kOperationCount; ++o) {
      calls.push_back({.operation = static_cast<Operation>(o),
                       .root = static_cast<int>(calls.size()) % size,
                       .count = count,
                       .uneven = calls.size() % 3 == 0,
                       .step = calls.size()});
    }
  }
  return calls;
}

class Races : public ::testing::TestWithParam<int> {
 protected:
  ThreadWorld world_{GetParam(), small_tuning()};

  // Makes a different rank late from time to time.
  static void dawdle(const Group& group, uint64_t step) {
    const auto chance = mixed(step, group.rank(), 9);
    if (chance % 8 == 0) {
      sleep_for(std::chrono::microseconds(chance / 8 % 300));
    } else if (chance % 3 == 0) {
      std::this_thread::yield();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Races, ::testing::Values(2, 3, 4));

TEST_P(Races, OfOrdinaryMemory) {
  const auto calls = calls_of_all_kinds(GetParam());
  const auto ends = world_.run([&](Group& group) {
    std::vector<std::byte> room(2 * (GetParam() + 1) * kLargest);
    Caller caller(group, values(), kTimeout);
    for (uint64_t round = 0; round < 3; ++round) {
      for (auto call : calls) {
        call.step += 1000 * round;
        if (round > 0) dawdle(group, call.step);
        caller.run(call, room.data(), 0, round == 1);
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(Races, OfRegisteredMemory) {
  const auto calls = calls_of_all_kinds(GetParam());
  const auto ends = world_.run([&](Group& group) {
    const size_t bytes = 2 * (GetParam() + 1) * kLargest;
    Caller caller(group, values(), kTimeout);
    for (uint64_t round = 0; round < 3; ++round) {
      auto* room = static_cast<std::byte*>(group.allocate_registered(bytes));
      for (auto call : calls) {
        call.step += 1000 * round;
        if (round > 0) dawdle(group, call.step);
        caller.run(call, room);
      }
      group.free_registered(room);
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(Races, OfMessagesBetweenCollectives) {
  const auto ends = world_.run([&](Group& group) {
    std::vector<std::byte> room(2 * (GetParam() + 1) * kLargest);
    Caller caller(group, values(), kTimeout);
    const int size = group.size();
    const int next = (group.rank() + 1) % size;
    const int before = (group.rank() + size - 1) % size;
    for (uint64_t step = 0; step < 60; ++step) {
      // Some messages are larger than a ring.
      const size_t bytes = step % 20 == 0 ? 600'000 : mixed(step) % 9000;
      std::vector<uint8_t> sent(bytes, static_cast<uint8_t>(group.rank()));
      std::vector<uint8_t> received(bytes, 0xff);
      auto receive = group.start_receive(
          before, 1, {.data = received.data(), .size = bytes}, DType::uint8);
      auto send = group.start_send(
          next, 1, {.data = sent.data(), .size = bytes}, DType::uint8);
      dawdle(group, step);
      caller.run({.operation = Operation::all_reduce,
                  .count = mixed(step, 1) % 3000,
                  .step = step},
                 room.data());
      group.wait(*send, kTimeout);
      group.wait(*receive, kTimeout);
      if (received !=
          std::vector<uint8_t>(bytes, static_cast<uint8_t>(before))) {
        throw std::runtime_error("wrong bytes");
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(Races, OfMessagesInAThreadBesideCollectives) {
  const auto ends = world_.run([&](Group& group) {
    const int size = group.size();
    std::jthread server(
        [&](std::stop_token stop) { group.serve_messages(std::move(stop)); });
    std::jthread talker([&] {
      const int next = (group.rank() + 1) % size;
      const int before = (group.rank() + size - 1) % size;
      for (int i = 0; i < 80; ++i) {
        std::vector<int32_t> sent(500, group.rank() * 1000 + i);
        std::vector<int32_t> received(500);
        auto send = group.start_send(
            next, i % 3, {.data = sent.data(), .size = 2000}, DType::int32);
        auto receive = group.start_receive(
            before, i % 3, {.data = received.data(), .size = 2000},
            DType::int32);
        group.wait(*receive, kTimeout);
        group.wait(*send, kTimeout);
        if (received != std::vector<int32_t>(500, before * 1000 + i)) {
          group.hang_up("wrong message");
          return;
        }
      }
    });
    std::vector<std::byte> room(2 * (GetParam() + 1) * kLargest);
    Caller caller(group, values(), kTimeout);
    for (uint64_t step = 0; step < 150; ++step) {
      caller.run({.operation = static_cast<Operation>(step % kOperationCount),
                  .count = mixed(step) % 2500,
                  .step = step},
                 room.data());
    }
    talker.join();
    // No rank may leave before all have finished their messages.
    group.barrier(kTimeout);
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(Races, OfDisagreementsAndDepartures) {
  for (int round = 0; round < 6; ++round) {
    ThreadWorld world(GetParam(), small_tuning());
    const auto ends = world.run([&](Group& group) {
      std::vector<float> data(5000, 1);
      const bool odd = group.rank() == 1;
      const End end = end_of([&] {
        group.all_reduce(data.data(), odd ? 5000 : 4999, DType::float32,
                         ReduceOp::sum, kTimeout);
      });
      if (end.kind != End::Kind::mismatch) {
        throw std::runtime_error("no mismatch: " + end.words);
      }
      if (odd) {
        std::jthread talker;
        if (round % 3 != 0) {
          talker = std::jthread([&] { group.keep_cause("rank 9 died"); });
        }
        if (round % 2 == 0) group.hang_up("enough");
        if (talker.joinable()) talker.join();
        return world.leave(1);
      }
      group.all_reduce(data.data(), 5000, DType::float32, ReduceOp::sum,
                       kTimeout);
    });
    for (int rank = 0; rank < GetParam(); ++rank) {
      if (rank == 1) {
        EXPECT_EQ(ends[1].kind, End::Kind::well) << ends[1];
      } else {
        EXPECT_EQ(ends[rank].kind, End::Kind::broken) << ends[rank];
        const char* words = round % 2 == 0   ? "rank 1 failed: enough"
                            : round % 3 != 0 ? "rank 9 died"
                                             : "rank 1 has left the group";
        EXPECT_EQ(ends[rank].words, words);
      }
    }
  }
}

TEST_P(Races, OfRanksThatWaitForEachOther) {
  ThreadWorld world(GetParam(), small_tuning());
  const auto ends = world.run([&](Group& group) {
    BucketRank buckets(group, values(),
                       {.buckets = {{.count = 100}}, .timeout = kTimeout});
    if (group.rank() == 0) buckets.run(1);
    group.barrier(kTimeout);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.kind, End::Kind::broken) << end;
    EXPECT_NE(end.words.find("wait for each other"), end.words.npos) << end;
  }
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
