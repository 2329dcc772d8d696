// Registered memory in the calls of a group: when each rank releases it, and
// what happens if a rank cannot map it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/protocol/core.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr auto kTimeout = 60s;
constexpr size_t kCount = 100'000;  // too much to travel with a call

size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:lockstep") != std::string::npos;
  }
  return count;
}

float* floats(Group& group) {
  return static_cast<float*>(group.allocate_registered(kCount * sizeof(float)));
}

void expect_sum(Group& group, float* data) {
  std::fill_n(data, kCount, static_cast<float>(group.rank() + 1));
  group.all_reduce(data, kCount, DType::float32, ReduceOp::sum, kTimeout);
  const auto sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
  for (size_t i = 0; i < kCount; ++i) {
    if (data[i] != sum) {
      throw std::runtime_error("element " + std::to_string(i) + " is " +
                               std::to_string(data[i]));
    }
  }
}

// Returns how many chunks this rank has staged so far: reductions in place
// stage none.
uint64_t staged(Group& group) { return group.core().own().staged; }

// Regression: memory that one rank had freed, even gigabytes, stayed mapped
// while the others called only barriers.
TEST(ShmRegisteredCalls, WhatIsFreedIsLetGoOfInTheNextCallOfAnyKind) {
  for (const bool messages : {false, true}) {
    SCOPED_TRACE(messages);
    ThreadWorld world(3, small_tuning());
    const size_t before = mappings();
    std::vector<float*> data(3);
    EXPECT_EQ(faults(world.run([&](Group& group) {
                data[group.rank()] = floats(group);
                group.barrier(kTimeout);
                for (int i = 0; i < 3; ++i)
                  expect_sum(group, data[group.rank()]);
              })),
              "");
    EXPECT_EQ(mappings(), before + 9);
    world.group(0).free_registered(data[0]);
    EXPECT_EQ(mappings(), before + 8);
    EXPECT_EQ(faults(world.run([&](Group& group) {
                if (!messages) return group.barrier(kTimeout);
                char byte = 1;
                const int next = (group.rank() + 1) % 3;
                const int before_it = (group.rank() + 2) % 3;
                auto send = group.start_send(next, 0, {&byte, 1}, DType::uint8);
                char got = 0;
                auto receive =
                    group.start_receive(before_it, 0, {&got, 1}, DType::uint8);
                group.wait(*receive, kTimeout);
                group.wait(*send, kTimeout);
              })),
              "");
    EXPECT_EQ(mappings(), before + 6);
    world.group(1).free_registered(data[1]);
    world.group(2).free_registered(data[2]);
  }
}

// Regression: the group was broken, because the rank had announced that it
// could reach the memory.
TEST(ShmRegisteredCalls, ARankWithoutDescriptorsStagesInstead) {
  for (const int size : {2, 3}) {
    SCOPED_TRACE(size);
    ThreadWorld world(size, small_tuning());
    std::vector<float*> data(size);
    // The ranks allocate in turn, so no rank has looked for the loans of the
    // later ones.
    for (int rank = 0; rank < size; ++rank)
      data[rank] = floats(world.group(rank));
    rlimit usual{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
    // The standard streams take these three. poll() needs a limit that is no
    // less than the number of sockets.
    const rlimit none{.rlim_cur = 3, .rlim_max = usual.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const auto ends =
        world.run([&](Group& group) { expect_sum(group, data[group.rank()]); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    EXPECT_EQ(faults(ends), "");
    EXPECT_EQ(faults(world.run([&](Group& group) {
                for (int i = 0; i < 3; ++i)
                  expect_sum(group, data[group.rank()]);
              })),
              "");
    // Memory that is allocated now is reduced in place again.
    EXPECT_EQ(faults(world.run([&](Group& group) {
                float* const fresh = floats(group);
                group.barrier(kTimeout);
                expect_sum(group, fresh);
                const uint64_t chunks = staged(group);
                for (int i = 0; i < 3; ++i) expect_sum(group, fresh);
                if (staged(group) != chunks) {
                  throw std::runtime_error("it was staged");
                }
                group.free_registered(fresh);
              })),
              "");
    for (int rank = 0; rank < size; ++rank) {
      world.group(rank).free_registered(data[rank]);
    }
  }
}

// A bug: the error named the owner of the memory by its number in the group,
// which is that of another rank in the default group.
TEST(ShmRegisteredCalls, MemoryThatIsLostIsThatOfARankOfTheDefaultGroup) {
  ThreadWorld world(2, small_tuning(), {7, 9});
  std::vector<float*> data(2);
  for (int rank = 0; rank < 2; ++rank) {
    data[rank] = floats(world.group(rank));
    auto& registered = world.group(rank).core().registered;
    // From now on the rank announces that its peer reaches this memory.
    registered.settle(registered.find(data[rank], 1).value(), true);
  }
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  // With this limit the first rank does not receive what the second has lent.
  const rlimit none{.rlim_cur = 3, .rlim_max = usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto ends =
      world.run([&](Group& group) { expect_sum(group, data[group.rank()]); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
  for (const auto& end : ends) {
    EXPECT_EQ(end.kind, End::Kind::broken);
    EXPECT_THAT(end.words,
                HasSubstr("the memory of rank 9 cannot be reached: "));
  }
  for (int rank = 0; rank < 2; ++rank) {
    world.group(rank).free_registered(data[rank]);
  }
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
