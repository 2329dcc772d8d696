// The contracts of lockstep/comm/point_to_point.h and object_collectives.h.

#include "lockstep/comm/point_to_point.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/object_collectives.h"
#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/tensors.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Kind = P2POp::Kind;

at::Tensor number(const ContractWorld& world, int64_t value) {
  return at::full({3}, value,
                  at::TensorOptions(at::kLong).device(world.device));
}

int64_t value_of(const at::Tensor& tensor) { return tensor[0].item<int64_t>(); }

CONTRACT_TEST(PointToPoint, AnyTensorGoesRoundARing, 2, 3, 5, 8) {
  auto group = world.init();
  const int next = (world.rank + 1) % world.size;
  const int previous = (world.rank + world.size - 1) % world.size;
  for (const auto& point : grid(world.size, moved_dtypes())) {
    Placed out(some_content(point.dtype, point.shape, world.rank), point.layout,
               world.device);
    auto want = some_content(point.dtype, point.shape, previous);
    auto in = Placed::empty_like(want, point.layout, world.device);
    if (point.async_op) {
      auto receiving = irecv(in.view, previous);
      auto sending = isend(out.view, next);
      sending->wait();
      receiving->wait();
      EXPECT_EQ(receiving->sourceRank(), previous);
    } else if (world.rank == 0) {
      send(out.view, next);
      EXPECT_EQ(recv(in.view, previous), previous);
    } else {
      EXPECT_EQ(recv(in.view, previous), previous);
      send(out.view, next);
    }
    EXPECT_TRUE(same_bits(in.view, want)) << point.describe();
    EXPECT_TRUE(in.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(PointToPoint, EachPairExchangesBothWays, 2, 3, 5) {
  auto group = world.init();
  for (int a = 0; a < world.size; ++a) {
    for (int b = a + 1; b < world.size; ++b) {
      if (world.rank != a && world.rank != b) continue;
      const int peer = world.rank == a ? b : a;
      auto in = number(world, -1);
      if (world.rank == a) send(number(world, a), peer);
      EXPECT_EQ(recv(in, peer), peer);
      if (world.rank == b) send(number(world, b), peer);
      EXPECT_EQ(value_of(in), peer);
    }
  }
}

CONTRACT_TEST(PointToPoint, AnySourceTellsWhoSent, 2, 3, 5, 8) {
  auto group = world.init();
  for (bool async_op : {false, true}) {
    if (world.rank != 0) {
      send(number(world, world.rank), 0);
    } else {
      std::set<int> seen;
      for (int i = 1; i < world.size; ++i) {
        auto in = number(world, -1);
        int from = -1;
        if (async_op) {
          auto work = irecv(in);
          work->wait();
          from = work->sourceRank();
        } else {
          from = recv(in);
        }
        EXPECT_EQ(value_of(in), from);
        seen.insert(from);
      }
      EXPECT_EQ(seen.size(), static_cast<size_t>(world.size - 1));
    }
    barrier();  // so the messages of the two passes do not mix
  }
}

CONTRACT_TEST(PointToPoint, AnySourceOfASubgroupIsARankOfTheWorld, 3, 5) {
  auto group = world.init();
  auto upper = new_group({1, 2});
  if (world.rank == 1) send(number(world, 41), 2, {.group = upper});
  if (world.rank == 2) {
    auto in = number(world, -1);
    EXPECT_EQ(recv(in, kAnySource, {.group = upper}), 1);
    EXPECT_EQ(value_of(in), 41);
  }
  if (world.rank == 2) isend(number(world, 42), 1, {.group = upper})->wait();
  if (world.rank == 1) {
    auto in = number(world, -1);
    auto work = irecv(in, kAnySource, {.group = upper});
    work->wait();
    EXPECT_EQ(work->sourceRank(), 2);
    EXPECT_EQ(value_of(in), 42);
  }
  barrier();
}

CONTRACT_TEST(PointToPoint, TagsTellMessagesApart, 2) {
  auto group = world.init();
  const std::vector<int> tags{0, 7, 1, kMaxTag};
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < tags.size(); ++i) {
    // Rank 1 takes them in the reverse order.
    int tag = tags[world.rank == 0 ? i : tags.size() - 1 - i];
    tensors.push_back(number(world, world.rank == 0 ? tag : -1));
    if (world.rank == 0) {
      works.push_back(isend(tensors.back(), 1, {.tag = tag}));
    } else {
      recv(tensors.back(), 0, {.tag = tag});
      EXPECT_EQ(value_of(tensors.back()), tag);
    }
  }
  for (auto& work : works) work->wait();
}

CONTRACT_TEST(PointToPoint, ManyInFlightArriveInTheOrderTheyWereSent, 2, 3) {
  auto group = world.init();
  constexpr int kMessages = 200;
  const int next = (world.rank + 1) % world.size;
  const int previous = (world.rank + world.size - 1) % world.size;
  std::vector<at::Tensor> in;
  std::vector<WorkPtr> works;
  for (int i = 0; i < kMessages; ++i) {
    in.push_back(number(world, -1));
    // Some receives are posted before their message is sent, some after it.
    if (i % 3 == 0) works.push_back(irecv(in[i], previous));
    works.push_back(isend(number(world, 1000 * world.rank + i), next));
    if (i % 3 != 0) works.push_back(irecv(in[i], previous));
  }
  for (size_t i = works.size(); i-- > 0;) works[i]->wait();
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_EQ(value_of(in[i]), 1000 * previous + i);
  }
}

CONTRACT_TEST(PointToPoint, GroupsKeepTheirMessagesApart, 2, 3) {
  auto group = world.init();
  auto other = new_group();
  auto from_default = number(world, -1);
  auto from_other = number(world, -1);
  if (world.rank == 0) {
    auto first = isend(number(world, 1), 1);
    auto second = isend(number(world, 2), 1, {.group = other});
    first->wait();
    second->wait();
  } else if (world.rank == 1) {
    recv(from_other, 0, {.group = other});
    recv(from_default, 0);
    EXPECT_EQ(value_of(from_other), 2);
    EXPECT_EQ(value_of(from_default), 1);
  }
}

// Errors number the other end by its rank in the world, also in a group.
CONTRACT_TEST(PointToPoint, ErrorsNameTheOtherEnd, 3) {
  auto group = world.init();
  // A receive that was given up may break its group.
  std::vector<ProcessGroupPtr> groups;
  for (int i = 0; i < 3; ++i) groups.push_back(new_group({1, 2}));
  auto in = number(world, -1);
  const auto options = [&](int i) {
    return PointToPointOptions{.group = groups[i],
                               .timeout = std::chrono::milliseconds(200)};
  };
  if (world.rank == 1) {
    const auto fails = [](const char* with) {
      return ThrowsMessage<c10::DistBackendError>(
          AllOf(HasSubstr(with), HasSubstr("allowed 200 ms")));
    };
    EXPECT_THAT([&] { recv(in, 2, options(0)); },
                fails("recv from rank 2 in group"));
    EXPECT_THAT([&] { irecv(in, 2, options(1))->wait(); },
                fails("irecv from rank 2 in group"));
    EXPECT_THAT([&] { recv(in, kAnySource, options(2)); },
                fails("recv from any rank in group"));
  }
  // No peer has left before rank 1 has seen its errors, which report lateness.
  const std::string seen = "seen";
  if (world.rank == 1) {
    inside(group).store()->set(seen, std::vector<uint8_t>{1});
  }
  inside(group).store()->wait({seen}, kGroupTimeout);
}

CONTRACT_TEST(PointToPoint, BatchesRunRingsBothWays, 2, 3, 5, 8) {
  auto group = world.init();
  const int next = (world.rank + 1) % world.size;
  const int previous = (world.rank + world.size - 1) % world.size;
  // The larger count is far more than the kernel buffers.
  for (int64_t count : {int64_t{3}, int64_t{1} << 20}) {
    auto make = [&](int value) {
      return at::full({count}, value,
                      at::TensorOptions(at::kInt).device(world.device));
    };
    auto right = make(-1);
    auto left = make(-1);
    // In a world of two both messages have the same peer: tags tell them apart.
    auto works = batch_isend_irecv({
        {.op = Kind::isend, .tensor = make(world.rank), .peer = next, .tag = 1},
        {.op = Kind::isend,
         .tensor = make(100 + world.rank),
         .peer = previous,
         .tag = 2},
        {.op = Kind::irecv, .tensor = right, .peer = previous, .tag = 1},
        {.op = Kind::irecv, .tensor = left, .peer = next, .tag = 2},
    });
    ASSERT_EQ(works.size(), 4u);
    for (auto& work : works) work->wait();
    EXPECT_TRUE(right.eq(previous).all().item<bool>());
    EXPECT_TRUE(left.eq(100 + next).all().item<bool>());
  }
}

CONTRACT_TEST(PointToPoint, BatchesOfASubgroupNameRanksOfTheWorld, 3, 5) {
  auto group = world.init();
  std::vector<int> ranks;
  for (int rank = 1; rank < world.size; ++rank) ranks.push_back(rank);
  auto upper = new_group(ranks);
  if (upper) {
    const int peers = world.size - 1;
    const int next = (world.rank - 1 + 1) % peers + 1;
    const int previous = (world.rank - 1 + peers - 1) % peers + 1;
    auto in = number(world, -1);
    for (auto& work : batch_isend_irecv({
             {.op = Kind::irecv,
              .tensor = in,
              .peer = previous,
              .group = upper},
             {.op = Kind::isend,
              .tensor = number(world, world.rank),
              .peer = next,
              .group = upper},
         })) {
      work->wait();
    }
    EXPECT_EQ(value_of(in), previous);
  }
  barrier();
}

// Returns one object of each kind of JSON, byte strings, and nestings of them;
// they differ by rank.
std::vector<Object> objects_of(int rank) {
  auto text = "rank " + std::to_string(rank);
  std::string long_text(static_cast<size_t>(rank + 1) * 1000, 'x');
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(i + static_cast<size_t>(rank));
  }
  return {
      nullptr,
      rank % 2 == 0,
      rank,
      -rank - 1,
      std::numeric_limits<int64_t>::min() + rank,
      std::numeric_limits<uint64_t>::max() - static_cast<uint64_t>(rank),
      0.1 * (rank + 1),
      1e300,
      "",
      text,
      "null \0 byte, \u00fcml\u00e4ut, \U0001f600",
      long_text,
      Object::array(),
      Object::object(),
      Object::binary({}),
      Object::binary(bytes),
      {{"rank", rank},
       {"empty", {}},
       {"parts", {1, 2.5, text, nullptr, {{"deep", {{"deeper", {rank}}}}}}},
       {"bytes", Object::binary(bytes)}},
      Object(std::vector<Object>(static_cast<size_t>(rank) * 10, text)),
  };
}

CONTRACT_TEST(Objects, BroadcastGivesThatOfSrc, 1, 2, 3, 5, 8) {
  auto group = world.init();
  const size_t kinds = objects_of(0).size();
  for (size_t i = 0; i < kinds; ++i) {
    const int src = static_cast<int>(i) % world.size;
    auto got = broadcast_object(objects_of(world.rank)[i], src);
    EXPECT_EQ(got, objects_of(src)[i]);
  }
}

CONTRACT_TEST(Objects, AllGatherTakesSizesThatDiffer, 1, 2, 3, 5, 8) {
  auto group = world.init();
  const size_t kinds = objects_of(0).size();
  for (size_t i = 0; i < kinds; ++i) {
    auto all = all_gather_object(objects_of(world.rank)[i]);
    ASSERT_EQ(all.size(), static_cast<size_t>(world.size));
    for (int rank = 0; rank < world.size; ++rank) {
      EXPECT_EQ(all[rank], objects_of(rank)[i]);
    }
  }
}

CONTRACT_TEST(Objects, GatherReachesDstOnly, 1, 2, 3, 5, 8) {
  auto group = world.init();
  const size_t kinds = objects_of(0).size();
  for (size_t i = 0; i < kinds; ++i) {
    const int dst = static_cast<int>(i) % world.size;
    auto all = gather_object(objects_of(world.rank)[i], dst);
    if (world.rank != dst) {
      EXPECT_TRUE(all.empty());
      continue;
    }
    ASSERT_EQ(all.size(), static_cast<size_t>(world.size));
    for (int rank = 0; rank < world.size; ++rank) {
      EXPECT_EQ(all[rank], objects_of(rank)[i]);
    }
  }
}

CONTRACT_TEST(Objects, ScatterGivesEachRankItsOwn, 1, 2, 3, 5, 8) {
  auto group = world.init();
  const size_t kinds = objects_of(0).size();
  for (int src = 0; src < world.size; ++src) {
    // The objects are of different kinds, so of different sizes; the other
    // ranks pass none.
    std::vector<Object> objects;
    for (int rank = 0; rank < world.size && world.rank == src; ++rank) {
      objects.push_back(objects_of(src)[static_cast<size_t>(rank + 7) % kinds]);
    }
    EXPECT_EQ(scatter_object(objects, src),
              objects_of(src)[static_cast<size_t>(world.rank + 7) % kinds]);
  }
}

CONTRACT_TEST(Objects, AMebibyteAndMoreTravels, 2, 3) {
  auto group = world.init();
  auto make = [](int rank) {
    std::vector<uint8_t> bytes((size_t{1} << 20) + static_cast<size_t>(rank));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(i * 31 + static_cast<size_t>(rank));
    }
    return Object{{"bytes", Object::binary(std::move(bytes))}};
  };
  EXPECT_TRUE(broadcast_object(make(world.rank), 1) == make(1));
  auto all = all_gather_object(make(world.rank));
  for (int rank = 0; rank < world.size; ++rank) {
    EXPECT_TRUE(all[rank] == make(rank)) << rank;
  }
}

CONTRACT_TEST(Objects, SubgroupsNameRanksOfTheWorld, 3, 5) {
  auto group = world.init();
  auto upper = new_group({1, 2});
  if (upper) {
    const ObjectOptions options{.group = upper};
    EXPECT_EQ(broadcast_object(world.rank, 2, options), 2);
    EXPECT_EQ(all_gather_object(world.rank, options),
              (std::vector<Object>{1, 2}));
    auto gathered = gather_object(world.rank, 1, options);
    EXPECT_EQ(gathered, world.rank == 1 ? (std::vector<Object>{1, 2})
                                        : std::vector<Object>{});
    std::vector<Object> parts;
    if (world.rank == 2) parts = {"to 1", "to 2"};
    EXPECT_EQ(scatter_object(parts, 2, options),
              "to " + std::to_string(world.rank));
  }
  barrier();
}

CONTRACT_TEST(Objects, WhatCannotTravelIsRefused, 1, 2) {
  auto group = world.init();
  Object deep;
  for (int level = 0; level < 1001; ++level) deep = Object::array({deep});
  EXPECT_THAT([&] { all_gather_object(deep); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("nested more than 1000 deep")));
  EXPECT_THAT([&] { broadcast_object(Object::binary({1, 2}, 42), world.rank); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("subtype")));
  Object allowed;
  for (int level = 0; level < 1000; ++level) allowed = Object::array({allowed});
  EXPECT_EQ(all_gather_object(allowed).size(), static_cast<size_t>(world.size));
}

CONTRACT_TEST(PointToPoint, AMessageThatHasEndedIsWaitedForAgainAtNoCost, 2) {
  auto group = world.init();
  const int peer = 1 - world.rank;
  auto sent = at::full({3}, world.rank, world.device);
  auto received = at::empty({3}, sent.options());
  auto works = batch_isend_irecv(
      {{P2POp::Kind::isend, sent, peer}, {P2POp::Kind::irecv, received, peer}});
  for (int wait = 0; wait < 3; ++wait) {
    for (auto& work : works) EXPECT_TRUE(work->wait());
  }
  all_reduce(sent);  // the group still works
  EXPECT_EQ(sent[0].item<float>(), 1);
}

}  // namespace
}  // namespace lockstep::internal::testing
