// Compares every operation of the protocol with the scalar reference, bit by
// bit, in worlds of threads. The limits are small, so small data reaches every
// algorithm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/protocol/core.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/kernels/kernels.h"
#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using ::testing::TestWithParam;

constexpr milliseconds kTimeout{30'000};
constexpr size_t kLargest = size_t{64} << 10;

const Values& values() {
  static const Values all(20'260'101, kLargest);
  return all;
}

// Returns the numbers of elements at the limits between algorithms, one less,
// and one more; several chunks, and some chunks and a part. If the ranks share
// `parts`, a limit applies to all parts together.
std::vector<size_t> sizes_for(DType dtype, const Tuning& tuning, size_t parts) {
  const size_t element = kernels::size_of(dtype);
  std::set<size_t> sizes{0, 1, 3, 7, 8, 9};
  for (size_t bytes : {Announcement::kInlineBytes, tuning.one_shot_bytes,
                       tuning.chunk_bytes, tuning.streaming_bytes}) {
    for (size_t share : {size_t{1}, parts}) {
      const size_t at = bytes / element / share;
      sizes.insert({at - std::min<size_t>(at, 1), at, at + 1});
    }
  }
  const size_t chunk = tuning.chunk_bytes / element;
  // The slices of a last chunk of three quarters lie at other places.
  sizes.insert({2 * chunk + chunk * 3 / 4, 3 * chunk, 3 * chunk + 5});
  return {sizes.begin(), sizes.end()};
}

std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (int t = 0; t < kernels::kDTypeCount; ++t) {
    all.push_back(static_cast<DType>(t));
  }
  return all;
}

std::vector<ReduceOp> ops_for(DType dtype) {
  std::vector<ReduceOp> all;
  for (int op = 0; op < kernels::kReduceOpCount; ++op) {
    if (kernels::is_reducible(dtype, static_cast<ReduceOp>(op))) {
      all.push_back(static_cast<ReduceOp>(op));
    }
  }
  return all;
}

// Runs all calls on all ranks, each in the room that `room_of` gives the rank.
using RoomOf = std::function<std::byte*(Group&, size_t bytes)>;
void run_all(ThreadWorld& world, std::vector<Call> calls, size_t shift = 0,
             bool in_place = false, const RoomOf& room_of = {}) {
  size_t bytes = 0;
  uint64_t step = 0;
  for (auto& call : calls) {
    call.step = ++step;
    bytes = std::max(bytes, Caller::room(call, world.size()));
  }
  const auto ends = world.run([&](Group& group) {
    std::vector<std::byte> own;
    std::byte* room = room_of ? room_of(group, bytes) : nullptr;
    const bool registered = room != nullptr;
    if (!registered) {
      own.resize(bytes);
      room = own.data();
    }
    Caller caller(group, values(), kTimeout);
    const auto before = group.core().sequence;
    for (const auto& call : calls) caller.run(call, room, shift, in_place);
    if (group.core().sequence != before + calls.size()) {
      throw std::runtime_error("calls were miscounted");
    }
    if (registered) group.free_registered(room);
  });
  EXPECT_EQ(faults(ends), "");
}

// Returns every dtype, every operation on it, and every size that matters.
std::vector<Call> reductions(Operation operation, int size) {
  std::vector<Call> calls;
  int turn = 0;
  for (DType dtype : all_dtypes()) {
    for (ReduceOp op : ops_for(dtype)) {
      for (size_t count : sizes_for(dtype, small_tuning(), size)) {
        calls.push_back({.operation = operation,
                         .dtype = dtype,
                         .op = op,
                         .root = turn++ % size,
                         .count = count});
      }
    }
  }
  return calls;
}

std::vector<Call> movements(Operation operation, int size, bool uneven) {
  std::vector<Call> calls;
  for (DType dtype : all_dtypes()) {
    for (size_t count : sizes_for(dtype, small_tuning(), size)) {
      calls.push_back({.operation = operation,
                       .dtype = dtype,
                       .root = static_cast<int>(calls.size()) % size,
                       .count = count,
                       .uneven = uneven});
    }
  }
  return calls;
}

// Returns a few calls of each kind, for tests in which the memory matters.
std::vector<Call> mixture(int size) {
  std::vector<Call> calls;
  for (int o = 0; o < kOperationCount; ++o) {
    const auto operation = static_cast<Operation>(o);
    for (DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
      for (size_t count : sizes_for(dtype, small_tuning(), size)) {
        calls.push_back({.operation = operation,
                         .dtype = dtype,
                         .root = static_cast<int>(calls.size()) % size,
                         .count = count,
                         .uneven = !reduces(operation) && count % 2 == 0});
      }
    }
  }
  return calls;
}

class ShmProtocol : public TestWithParam<int> {
 protected:
  ThreadWorld world_{GetParam(), small_tuning()};
};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmProtocol, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(ShmProtocol, AllReduceEqualsScalarReference) {
  run_all(world_, reductions(Operation::all_reduce, GetParam()));
}

TEST_P(ShmProtocol, ReduceEqualsScalarReferenceOnTheRootAlone) {
  run_all(world_, reductions(Operation::reduce, GetParam()));
}

TEST_P(ShmProtocol, ReduceScatterEqualsScalarReference) {
  run_all(world_, reductions(Operation::reduce_scatter, GetParam()));
}

TEST_P(ShmProtocol, ReduceScatterTakesUnevenCountsAndNone) {
  auto calls = reductions(Operation::reduce_scatter, GetParam());
  std::erase_if(calls,
                [](const Call& call) { return call.dtype >= DType::int8; });
  for (auto& call : calls) call.uneven = true;
  run_all(world_, calls);
}

TEST_P(ShmProtocol, ReduceScatterWritesOverItsOwnInput) {
  auto calls = reductions(Operation::reduce_scatter, GetParam());
  std::erase_if(calls, [](const Call& call) {
    return call.dtype != DType::float32 && call.dtype != DType::uint8;
  });
  run_all(world_, calls, 0, true);
}

TEST_P(ShmProtocol, MovesBytesOfEqualPieces) {
  for (int o = static_cast<int>(Operation::broadcast); o < kOperationCount;
       ++o) {
    run_all(world_, movements(static_cast<Operation>(o), GetParam(), false));
  }
}

TEST_P(ShmProtocol, MovesBytesOfUnevenPiecesAndNone) {
  for (int o = static_cast<int>(Operation::all_gather); o < kOperationCount;
       ++o) {
    run_all(world_, movements(static_cast<Operation>(o), GetParam(), true));
  }
}

TEST_P(ShmProtocol, TakesPointersThatAreAlignedToTheElementOnly) {
  for (size_t shift : {1, 3, 7}) run_all(world_, mixture(GetParam()), shift);
}

TEST_P(ShmProtocol, RegisteredMemoryOfAllRanksGivesTheSameBits) {
  // Uses whole regions, and places in the middle of them; a new region every
  // time.
  for (size_t shift : {0, 5, 1031}) {
    run_all(world_, mixture(GetParam()), shift, shift == 5,
            [&](Group& group, size_t bytes) {
              return static_cast<std::byte*>(
                  group.allocate_registered(bytes + 16 * shift));
            });
  }
}

TEST_P(ShmProtocol, RegisteredMemoryOfSomeRanksGivesTheSameBits) {
  for (int with : {0, GetParam() - 1}) {
    run_all(world_, mixture(GetParam()), 0, false,
            [&](Group& group, size_t bytes) -> std::byte* {
              if (group.rank() != with && group.rank() % 3 != 1) return nullptr;
              return static_cast<std::byte*>(group.allocate_registered(bytes));
            });
  }
}

TEST_P(ShmProtocol, RegisteredMemoryIsFreedAndAllocatedAgain) {
  const auto ends = world_.run([&](Group& group) {
    Caller caller(group, values(), kTimeout);
    std::vector<std::byte*> rooms;
    for (uint64_t step = 1; step <= 300; ++step) {
      const Call call{.operation = Operation::all_reduce,
                      .count = 10 + mixed(step) % 4000,
                      .step = step};
      const size_t bytes = Caller::room(call, group.size());
      // Each rank has another number of regions and frees them in another
      // order.
      rooms.push_back(
          static_cast<std::byte*>(group.allocate_registered(bytes)));
      caller.run(call, rooms.back());
      if (rooms.size() > size_t(group.rank()) % 3) {
        const auto which = mixed(step, group.rank()) % rooms.size();
        group.free_registered(rooms[which]);
        rooms.erase(rooms.begin() + static_cast<ptrdiff_t>(which));
      }
    }
    for (auto* room : rooms) group.free_registered(room);
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(ShmProtocol, AllRanksHaveEqualBitsOfNaNsAndZeros) {
  // The result may be any NaN, but must be the same one on all ranks.
  const int size = GetParam();
  std::vector<std::vector<uint16_t>> results(size);
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (ReduceOp op : ops_for(dtype)) {
      const auto ends = world_.run([&](Group& group) {
        auto& data = results[group.rank()];
        data.resize(9001);
        for (size_t i = 0; i < data.size(); ++i) {
          data[i] = static_cast<uint16_t>(mixed(i, group.rank()));
        }
        group.all_reduce(data.data(), data.size(), dtype, op, kTimeout);
      });
      EXPECT_EQ(faults(ends), "");
      for (int rank = 1; rank < size; ++rank) {
        EXPECT_TRUE(results[rank] == results[0])
            << kernels::name_of(dtype) << " " << kernels::name_of(op);
      }
    }
  }
}

TEST_P(ShmProtocol, LateRanksChangeNothing) {
  const auto ends = world_.run([&](Group& group) {
    Caller caller(group, values(), kTimeout);
    std::vector<std::byte> room(kLargest * 4);
    for (uint64_t step = 1; step <= 60; ++step) {
      // The sleep is longer than the spinning; some sleeps are longer than the
      // yielding, too.
      const auto chance = mixed(step, group.rank(), 3);
      if (chance % 4 == 0) {
        sleep_for(std::chrono::microseconds(chance / 4 % 4000));
      }
      caller.run({.operation = static_cast<Operation>(step % kOperationCount),
                  .root = static_cast<int>(step) % group.size(),
                  .count = mixed(step) % 2500,
                  .step = step},
                 room.data());
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(ShmProtocol, TheDefaultTuningIsTakenToo) {
  const auto tuning = default_tuning(GetParam());
  check(tuning);
  ThreadWorld world(GetParam(), tuning);
  const Values large(3, 3 * tuning.chunk_bytes + 64);
  const auto ends = world.run([&](Group& group) {
    Caller caller(group, large, kTimeout);
    std::vector<std::byte> room;
    uint64_t step = 0;
    for (size_t bytes : {size_t{4}, tuning.one_shot_bytes, tuning.chunk_bytes,
                         3 * tuning.chunk_bytes + 36}) {
      for (auto operation : {Operation::all_reduce, Operation::broadcast}) {
        const Call call{
            .operation = operation, .count = bytes / 4, .step = ++step};
        room.resize(Caller::room(call, group.size()));
        caller.run(call, room.data());
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST(ShmProtocolGroups, SeveralGroupsAtOnceDoNotDisturbEachOther) {
  ThreadWorld one(3, small_tuning());
  ThreadWorld two(3, small_tuning());
  ThreadWorld three(2, small_tuning());
  const auto ends = one.run([&](Group& group) {
    // Each rank uses its groups in turn, in its one thread.
    Caller first(group, values(), kTimeout);
    Caller second(two.group(2 - group.rank()), values(), kTimeout);
    std::vector<std::byte> room(kLargest * 4);
    for (uint64_t step = 1; step <= 400; ++step) {
      const Call call{
          .operation = static_cast<Operation>(step % kOperationCount),
          .root = static_cast<int>(step) % 3,
          .count = mixed(step) % 1500,
          .step = step};
      first.run(call, room.data());
      second.run(call, room.data());
      if (group.rank() < 2) {
        Caller third(three.group(group.rank()), values(), kTimeout);
        third.run({.operation = Operation::all_reduce,
                   .count = mixed(step, 5) % 1500,
                   .step = step + 1000},
                  room.data());
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST(ShmProtocolGroups, ManyGroupsOfOneRankRunInThreadsAtOnce) {
  std::vector<std::unique_ptr<ThreadWorld>> worlds;
  for (int i = 0; i < 4; ++i) {
    worlds.push_back(std::make_unique<ThreadWorld>(2, small_tuning()));
  }
  std::vector<std::vector<End>> ends(worlds.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < worlds.size(); ++i) {
    threads.emplace_back([&, i] {
      ends[i] = worlds[i]->run([&](Group& group) {
        Caller caller(group, values(), kTimeout);
        std::vector<std::byte> room(kLargest * 4);
        for (uint64_t step = 1; step <= 300; ++step) {
          caller.run({.operation = Operation::all_reduce,
                      .dtype = DType::int32,
                      .count = mixed(step, i) % 4000,
                      .step = step},
                     room.data());
        }
      });
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& end : ends) EXPECT_EQ(faults(end), "");
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
