// The contract of groups beside the default one (lockstep/comm/init.h).

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/object_collectives.h"
#include "tests/comm/contract/contract.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::microseconds;
using ::testing::ElementsAre;

// Returns the sum over `group` of each member's rank in the world; only members
// may call this.
double sum_of_ranks(const ContractWorld& world, const ProcessGroupPtr& group) {
  auto tensor = at::full({5}, world.rank, world.device).to(at::kFloat);
  all_reduce(tensor, {.group = group});
  return tensor[4].item<double>();
}

double sum(const std::vector<int>& ranks) {
  double total = 0;
  for (int rank : ranks) total += rank;
  return total;
}

void expect_works(const ContractWorld& world, const ProcessGroupPtr& group,
                  const std::vector<int>& ranks) {
  ASSERT_NE(group, nullptr);
  EXPECT_EQ(group->global_ranks(), ranks);
  EXPECT_EQ(get_world_size(group), static_cast<int>(ranks.size()));
  EXPECT_EQ(sum_of_ranks(world, group), sum(ranks));
}

CONTRACT_TEST(Groups, RanksOfTheGroupAndOfTheWorldConvert, 3, 5, 8) {
  auto group = world.init();
  auto upper = new_group({2, 1});  // sorted
  if (upper) {
    EXPECT_THAT(upper->global_ranks(), ElementsAre(1, 2));
    EXPECT_EQ(upper->rank(), world.rank - 1);
    EXPECT_EQ(get_rank(upper), world.rank - 1);
    EXPECT_EQ(upper->group_rank(2), 1);
    EXPECT_EQ(upper->global_rank(0), 1);
    EXPECT_THROW(upper->group_rank(0), std::invalid_argument);
    EXPECT_THROW(upper->global_rank(2), std::invalid_argument);
    EXPECT_THROW(upper->global_rank(-1), std::invalid_argument);
  }
  for (int rank = 0; rank < world.size; ++rank) {
    EXPECT_EQ(group->group_rank(rank), rank);
    EXPECT_EQ(group->global_rank(rank), rank);
  }
  barrier();
}

CONTRACT_TEST(Groups, RootsAreRanksOfTheWorld, 3, 5, 8) {
  auto group = world.init();
  const std::vector<int> ranks{1, 2};
  auto upper = new_group(ranks);
  if (upper) {
    auto at_device = at::TensorOptions(at::kFloat).device(world.device);
    for (int root : ranks) {
      auto value = at::full({3}, world.rank, at_device);
      broadcast(value, root, {.group = upper});
      EXPECT_EQ(value[0].item<int>(), root);

      value = at::full({3}, world.rank, at_device);
      reduce(value, root, {.group = upper});
      if (world.rank == root) {
        EXPECT_EQ(value[0].item<int>(), 3);
      }

      std::vector<at::Tensor> list;
      if (world.rank == root) list = at::zeros({2, 3}, at_device).unbind();
      gather(at::full({3}, world.rank, at_device), list, root,
             {.group = upper});
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(list[i][0].item<int>(), ranks[i]);
      }

      value = at::zeros({3}, at_device);
      if (world.rank == root) {
        list = {at::full({3}, 10, at_device), at::full({3}, 20, at_device)};
      }
      scatter(value, list, root, {.group = upper});
      EXPECT_EQ(value[0].item<int>(), 10 * world.rank);
    }
  }
  barrier();
}

CONTRACT_TEST(Groups, OverlappingOnesInterleaveTheirOperations, 3, 5, 8) {
  auto group = world.init();
  // Each rank is in two pairs with its neighbours, and in the world.
  std::map<int, ProcessGroupPtr> pairs;
  for (int first = 0; first < world.size; ++first) {
    auto pair = new_group({first, (first + 1) % world.size});
    if (pair) pairs[first] = pair;
  }
  ASSERT_EQ(pairs.size(), 2u);
  auto all = new_group();
  struct Flight {
    at::Tensor tensor;
    double expected;
    WorkPtr work;
  };
  std::vector<Flight> flights;
  auto start = [&](const ProcessGroupPtr& in) {
    auto tensor = at::full({1001}, world.rank, world.device).to(at::kFloat);
    auto work = all_reduce(tensor, {.group = in, .async_op = true});
    flights.push_back({tensor, sum(in->global_ranks()), work});
  };
  for (int round = 0; round < 5; ++round) {
    for (auto& [first, pair] : pairs) start(pair);
    start(all);
    start(group.get());
    for (auto& [first, pair] : pairs) start(pair);
  }
  for (size_t i = flights.size(); i-- > 0;) {
    flights[i].work->wait();
    EXPECT_TRUE(flights[i].tensor.eq(flights[i].expected).all().item<bool>());
  }
  // Synchronous operations also work, as long as no circle of ranks waits for
  // each other.
  for (auto& [first, pair] : pairs) {
    EXPECT_EQ(sum_of_ranks(world, pair), sum(pair->global_ranks()));
  }
}

CONTRACT_TEST(Groups, NewSubgroupsAreNeighbours, 1, 2, 3, 8) {
  auto group = world.init();
  for (int size = 1; size <= world.size; ++size) {
    if (world.size % size != 0) continue;
    const int first = world.rank / size * size;
    std::vector<int> ranks;
    for (int i = 0; i < size; ++i) ranks.push_back(first + i);
    expect_works(world, new_subgroups(size), ranks);
  }
}

CONTRACT_TEST(Groups, NewSubgroupsByEnumerationGiveEachRankItsOwn, 5, 8) {
  auto group = world.init();
  const std::vector<std::vector<int>> sets{{4, 0}, {1}, {2}};
  auto own = new_subgroups_by_enumeration(sets);
  if (world.rank == 0 || world.rank == 4) {
    expect_works(world, own, {0, 4});
  } else if (world.rank < 3) {
    expect_works(world, own, {world.rank});
  } else {
    EXPECT_EQ(own, nullptr);  // rank 3, and ranks 5 and up
  }
  barrier();
}

CONTRACT_TEST(Groups, SplitDividesTheDefaultGroupAndAPartOfIt, 5, 8) {
  auto group = world.init();
  // Rank 2 is in no part. The ranks of a part keep their order.
  std::vector<int> high;
  for (int rank = 3; rank < world.size; ++rank) high.push_back(rank);
  auto part = split_group({{0, 1}, high});
  if (world.rank == 2) {
    EXPECT_EQ(part, nullptr);
  } else {
    expect_works(world, part, world.rank < 2 ? std::vector<int>{0, 1} : high);
  }
  // Splitting a part takes ranks *of the part*, and only its members call.
  if (world.rank > 2) {
    auto half = split_group({{0}, {1}}, {.parent = part});
    if (world.rank < 5) {
      expect_works(world, half, {world.rank});
    } else {
      EXPECT_EQ(half, nullptr);
    }
    // A second split of the same parent makes another group.
    auto pair = split_group({{0, 1}}, {.parent = part});
    if (world.rank < 5) {
      expect_works(world, pair, {3, 4});
      EXPECT_NE(pair->name(), half->name());
    }
  }
  expect_works(world, group.get(), [&] {
    std::vector<int> all;
    for (int rank = 0; rank < world.size; ++rank) all.push_back(rank);
    return all;
  }());
}

// The splits of a parent were counted on each rank: a rank that had left one
// out, as it may if it is in no part, then joined another group than its peers.
CONTRACT_TEST(Groups, SplitsMayBeLeftOutByRanksThatAreInNoPart, 3, 5) {
  auto group = world.init();
  const SplitGroupOptions options{.timeout = std::chrono::seconds(5)};
  for (int round = 0; round < 2; ++round) {
    if (world.rank < 2)
      expect_works(world, split_group({{1, 0}}, options), {0, 1});
    if (world.rank < 3) {
      expect_works(world, split_group({{0, 1, 2}}, options), {0, 1, 2});
    }
    if (world.rank > 0) {
      auto part = split_group({{1, 2}}, options);
      if (world.rank < 3) expect_works(world, part, {1, 2});
    }
  }
  barrier();
}

CONTRACT_TEST(Groups, DestroyingOneLeavesTheOthersAlone, 3, 5) {
  auto group = world.init();
  auto first = new_group();
  auto second = new_group({0, 1});
  auto third = new_group();
  EXPECT_NE(first->name(), third->name());
  destroy_process_group(first);
  EXPECT_THROW(sum_of_ranks(world, first), std::invalid_argument);
  EXPECT_THROW(destroy_process_group(first), std::invalid_argument);
  std::vector<int> all;
  for (int rank = 0; rank < world.size; ++rank) all.push_back(rank);
  expect_works(world, third, all);
  expect_works(world, group.get(), all);
  if (second) {
    expect_works(world, second, {0, 1});
    destroy_process_group(second);
  }
  // New groups can still be made.
  expect_works(world, new_group(), all);
  expect_works(world, third, all);
}

// Stops another process again and again for a few milliseconds, as a busy host
// does.
class Pauses {
 public:
  explicit Pauses(pid_t process)
      : thread_([process](const std::stop_token& stop) {
          std::minstd_rand random(1);
          while (!stop.stop_requested()) {
            ::kill(process, SIGSTOP);
            std::this_thread::sleep_for(microseconds(random() % 2000));
            ::kill(process, SIGCONT);
            std::this_thread::sleep_for(microseconds(random() % 200));
          }
        }) {}

 private:
  std::jthread thread_;
};

CONTRACT_TEST(Groups, OnesThatAreDestroyedAtOnceWereMadeOnEveryRank, 2) {
  auto group = world.init();
  const auto processes = all_gather_object(static_cast<int>(::getpid()));
  std::optional<Pauses> pauses;
  if (world.rank == 0) pauses.emplace(processes.back().get<int>());
  for (int round = 0; round < 60; ++round) destroy_process_group(new_group());
  pauses.reset();
  EXPECT_EQ(sum_of_ranks(world, group), world.size * (world.size - 1) / 2);
}

CONTRACT_TEST(Groups, TheDefaultOneTakesAllOthersWithIt, 2, 3) {
  ProcessGroupPtr other;
  {
    auto group = world.init();
    other = new_group();
    barrier({.group = other});
  }
  EXPECT_FALSE(is_initialized());
  EXPECT_THROW(sum_of_ranks(world, other), std::invalid_argument);
  auto group = world.init();
  expect_works(world, new_group(), group->global_ranks());
}

CONTRACT_TEST(Groups, NewOnesHaveTheTimeoutTheyAreGiven, 2) {
  auto group = world.init();
  EXPECT_EQ(new_group()->timeout(), kGroupTimeout);
  auto brief = new_group({}, {.timeout = std::chrono::milliseconds(1234)});
  EXPECT_EQ(brief->timeout(), std::chrono::milliseconds(1234));
  auto part = split_group({{0, 1}}, {.parent = brief});
  EXPECT_EQ(part->timeout(), std::chrono::milliseconds(1234));
  part = split_group({{0, 1}}, {.timeout = std::chrono::milliseconds(99'000)});
  EXPECT_EQ(part->timeout(), std::chrono::milliseconds(99'000));
  EXPECT_EQ(part->backend_config(), group->backend_config());
}

}  // namespace
}  // namespace lockstep::internal::testing
