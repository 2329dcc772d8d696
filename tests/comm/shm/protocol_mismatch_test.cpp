// Ranks that call different things: the errors of all ranks say so, no data is
// touched, and the group still works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/number_list.h"
#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using ::testing::HasSubstr;

constexpr milliseconds kTimeout{30'000};
constexpr int kRanks = 3;
constexpr int kOdd = 1;  // the rank whose call differs
constexpr std::byte kMark{0x5c};

// The data of a call; no byte of it may change.
struct Memory {
  std::vector<std::byte> bytes = std::vector<std::byte>(200'000, kMark);

  void* at(int part) { return bytes.data() + size_t(part) * 40'000; }
  std::vector<Bytes> pieces(const std::vector<size_t>& sizes) {
    std::vector<Bytes> all;
    for (size_t i = 0; i < sizes.size(); ++i) {
      all.push_back({.data = at(static_cast<int>(i)), .size = sizes[i]});
    }
    return all;
  }
  std::vector<ConstBytes> inputs(const std::vector<size_t>& sizes) {
    std::vector<ConstBytes> all;
    for (const auto& piece : pieces(sizes)) {
      all.push_back({.data = piece.data, .size = piece.size});
    }
    return all;
  }
};

using Action = std::function<void(Group&, Memory&)>;

struct Disagreement {
  const char* name;
  Action most;
  Action odd;
  // The words of every rank must contain these.
  std::vector<std::string> told;
  bool of_pairs = false;
};
void PrintTo(const Disagreement& which, std::ostream* out) {
  *out << which.name;
}

Action all_reduce(size_t count, DType dtype = DType::float32,
                  ReduceOp op = ReduceOp::sum) {
  return [=](Group& group, Memory& memory) {
    group.all_reduce(memory.at(0), count, dtype, op, kTimeout);
  };
}
Action reduce(int root) {
  return [=](Group& group, Memory& memory) {
    group.reduce(memory.at(0), 5000, DType::int32, ReduceOp::max, root,
                 kTimeout);
  };
}
Action broadcast(size_t bytes, int root, DType dtype = DType::float32) {
  return [=](Group& group, Memory& memory) {
    group.broadcast({.data = memory.at(0), .size = bytes}, root, dtype,
                    kTimeout);
  };
}
Action all_gather(const std::vector<size_t>& outputs, size_t input) {
  return [=](Group& group, Memory& memory) {
    group.all_gather(memory.pieces(outputs),
                     {.data = memory.at(4), .size = input}, DType::uint8,
                     kTimeout);
  };
}
// Each rank passes the size in `given`; the root expects the sizes in
// `gathered`.
Action gather(int root, const std::vector<size_t>& gathered,
              const std::vector<size_t>& given) {
  return [=](Group& group, Memory& memory) {
    std::vector<Bytes> outputs;
    if (group.rank() == root) outputs = memory.pieces(gathered);
    group.gather(outputs, {.data = memory.at(4), .size = given[group.rank()]},
                 root, DType::uint8, kTimeout);
  };
}
Action scatter(int root, const std::vector<size_t>& inputs, size_t output) {
  return [=](Group& group, Memory& memory) {
    std::vector<ConstBytes> given;
    if (group.rank() == root) given = memory.inputs(inputs);
    group.scatter({.data = memory.at(4), .size = output}, given, root,
                  DType::uint8, kTimeout);
  };
}
Action all_to_all(const std::vector<size_t>& outputs,
                  const std::vector<size_t>& inputs) {
  return [=](Group& group, Memory& memory) {
    group.all_to_all(memory.pieces(outputs), memory.inputs(inputs),
                     DType::uint8, kTimeout);
  };
}
Action reduce_scatter(const std::vector<size_t>& counts) {
  return [=](Group& group, Memory& memory) {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < kRanks; ++rank) inputs.push_back(memory.at(rank));
    group.reduce_scatter(memory.at(4), inputs, counts, DType::float64,
                         ReduceOp::sum, kTimeout);
  };
}
Action barrier() {
  return [](Group& group, Memory&) { group.barrier(kTimeout); };
}

const Disagreement kDisagreements[] = {
    {"Operation", all_reduce(4), barrier(), {"all_reduce", "barrier"}},
    {"OperationOfLargeData",
     all_reduce(9000),
     broadcast(36'000, 0),
     {"all_reduce", "broadcast", "9000"}},
    {"Dtype", all_reduce(4), all_reduce(4, DType::int32), {"Float", "Int"}},
    {"DtypeOfMovedBytes",
     broadcast(64, 0),
     broadcast(64, 0, DType::int32),
     {"Float", "Int"}},
    {"ReduceOp",
     all_reduce(4),
     all_reduce(4, DType::float32, ReduceOp::max),
     {"SUM", "MAX"}},
    {"Elements", all_reduce(4), all_reduce(5), {"4", "5"}},
    {"ElementsOfTwoAlgorithms", all_reduce(4), all_reduce(9000), {"4", "9000"}},
    {"ElementsOfLargeData",
     all_reduce(9000),
     all_reduce(8999),
     {"9000", "8999"}},
    {"Root", reduce(0), reduce(2), {"root rank 0", "root rank 2"}},
    {"RootOfBroadcast",
     broadcast(36'000, 0),
     broadcast(36'000, 1),
     {"root rank 0", "root rank 1"}},
    {"BytesOfBroadcast", broadcast(64, 0), broadcast(68, 0), {"16", "17"}},
    {"SizesOfAllGather",
     all_gather({8, 8, 8}, 8),
     all_gather({9, 9, 9}, 9),
     {"8", "9"}},
    {"OneSizeOfAllGather",
     all_gather({8, 8, 8}, 8),
     all_gather({8, 8, 7}, 8),
     {"all_gather"}},
    {"UnevenSizesOfAllGather",
     all_gather({900, 900, 901}, 900),
     all_gather({900, 902, 901}, 900),
     {"all_gather"},
     true},
    {"SizesOfGather",
     gather(0, {8, 9, 10}, {8, 9, 10}),
     gather(0, {8, 9, 10}, {8, 11, 10}),
     {"9", "11"},
     true},
    {"SizesOfScatter",
     scatter(2, {8, 10, 8}, 8),
     scatter(2, {8, 10, 8}, 11),
     {"10", "11"},
     true},
    {"SizesOfAllToAll",
     all_to_all({8, 8, 8}, {8, 8, 8}),
     all_to_all({8, 8, 8}, {8, 8, 9000}),
     {"8", "9000"},
     true},
    {"CountsOfReduceScatter",
     reduce_scatter({1000, 1000, 1000}),
     reduce_scatter({1000, 999, 1000}),
     {"reduce_scatter"}},
    {"UnevenCountsOfReduceScatter",
     reduce_scatter({1000, 998, 1000}),
     reduce_scatter({1000, 999, 1000}),
     {"7984", "7992"},
     true},
};

class ShmProtocolMismatch : public ::testing::TestWithParam<Disagreement> {};
INSTANTIATE_TEST_SUITE_P(Of, ShmProtocolMismatch,
                         ::testing::ValuesIn(kDisagreements),
                         [](const auto& which) {
                           return std::string(which.param.name);
                         });

std::set<int> ranks_named_in(std::string_view words) {
  std::set<int> named;
  for (const std::string_view before :
       {"(rank ", "(ranks ", "; rank ", "; ranks "}) {
    for (size_t at = words.find(before); at != std::string_view::npos;
         at = words.find(before, at + 1)) {
      std::string_view rest = words.substr(at + before.size());
      for (const int rank : read_numbers(rest)) named.insert(rank);
    }
  }
  return named;
}

TEST_P(ShmProtocolMismatch, IsToldToAllRanksAndTheGroupGoesOn) {
  const auto& which = GetParam();
  ThreadWorld world(kRanks, small_tuning());
  const Values values(1, 40'000);
  for (int repeated = 0; repeated < 3; ++repeated) {
    std::vector<Memory> memory(kRanks);
    const auto ends = world.run([&](Group& group) {
      const auto& action = group.rank() == kOdd ? which.odd : which.most;
      action(group, memory[group.rank()]);
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(ends[rank].kind, End::Kind::mismatch) << ends[rank];
      EXPECT_EQ(ends[rank].words, ends[0].words);
      for (const auto& byte : memory[rank].bytes) {
        ASSERT_EQ(byte, kMark) << "data was touched";
      }
    }
    for (const auto& text : which.told) {
      EXPECT_THAT(ends[0].words, HasSubstr(text));
    }
    // A call with a size for each pair of ranks names only the pair that
    // differs.
    if (!which.of_pairs) {
      EXPECT_EQ(ranks_named_in(ends[0].words), (std::set<int>{0, 1, 2}));
    }
    const auto after = world.run([&](Group& group) {
      Caller caller(group, values, kTimeout);
      std::vector<std::byte> room(300'000);
      uint64_t step = 0;
      for (int o = 0; o < kOperationCount; ++o) {
        for (size_t count : {3, 60, 5000}) {
          caller.run({.operation = static_cast<Operation>(o),
                      .root = o % kRanks,
                      .count = count,
                      .uneven = o % 2 == 1,
                      .step = ++step},
                     room.data());
        }
      }
    });
    EXPECT_EQ(faults(after), "");
  }
}

TEST(ShmProtocolMismatchOfMany, EveryRankIsDescribed) {
  ThreadWorld world(5, small_tuning());
  const auto ends = world.run([&](Group& group) {
    std::vector<float> data(100);
    group.all_reduce(data.data(), 10 + group.rank(), DType::float32,
                     ReduceOp::sum, kTimeout);
  });
  for (const auto& end : ends) {
    ASSERT_EQ(end.kind, End::Kind::mismatch) << end;
    for (int rank = 0; rank < 5; ++rank) {
      EXPECT_THAT(end.words, HasSubstr("rank " + std::to_string(rank) +
                                       ": all_reduce #1 (SUM, Float, " +
                                       std::to_string(10 + rank)));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
