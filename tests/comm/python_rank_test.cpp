// Python ranks and our ranks in one group, with the same keys in the store:
// over Gloo, or over shared memory if Python has our backend.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

using testing::World;

// The backend of both languages, and the Python that has it.
struct Meeting {
  const char* backend;
  const char* python;
};
constexpr Meeting kGloo{"cpu:gloo", LOCKSTEP_TORCH_PYTHON};
constexpr Meeting kOwn{"cpu:lockstep", LOCKSTEP_WHEEL_PYTHON};

// Replaces this rank with a Python process in its environment, which runs
// `part` of python_rank.py.
void be_python(const World& world, const char* part, const Meeting& meeting) {
  // `timeout` ends the process even if this rank is killed.
  testing::ProgramSetup setup{
      .environment = {"TMPDIR=" + world.folder.string()}};
  for (const char* name :
       {"PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}) {
    setup.environment.push_back(std::string(name) + "=" + std::getenv(name));
  }
  testing::RunningProgram python(
      {"/usr/bin/timeout", "--kill-after=5", "45", meeting.python,
       LOCKSTEP_SOURCE_DIR "/tests/comm/python_rank.py", part, meeting.backend},
      setup);
  auto result = python.finish(std::chrono::seconds(52));
  EXPECT_EQ(result.exit_code, 0) << testing::words_of_peer(result);
}

void be_ours(const World& world, const char* backend) {
  auto group =
      init_process_group(backend, {.timeout = std::chrono::seconds(40)});
  int rank = world.rank;
  int size = world.size;

  auto total = torch::arange(5, torch::kDouble) + rank;
  all_reduce(total);
  EXPECT_TRUE(total.equal(size * torch::arange(5, torch::kDouble) +
                          size * (size - 1) / 2.0))
      << total;

  for (int source = 0; source < size; ++source) {
    auto value = torch::full({3}, rank, torch::kLong);
    broadcast(value, source);
    EXPECT_TRUE(value.equal(torch::full({3}, source, torch::kLong))) << value;
  }

  std::vector<torch::Tensor> parts;
  for (int i = 0; i < size; ++i) parts.push_back(torch::empty({2}));
  all_gather(parts, torch::full({2}, static_cast<float>(rank)));
  for (int source = 0; source < size; ++source) {
    EXPECT_TRUE(parts[source].eq(source).all().item<bool>()) << parts[source];
  }

  barrier();
}

// Checks the sum of the ranks in a group of `ranks`; does nothing if this rank
// is not a member.
void expect_sum_of_ranks(const ProcessGroupPtr& group, std::vector<int> ranks) {
  const int rank = get_rank();
  ASSERT_EQ(group != nullptr, std::ranges::count(ranks, rank) == 1);
  if (!group) return;
  auto sum = torch::full({3}, rank, torch::kLong);
  all_reduce(sum, {.group = group});
  const int total = std::accumulate(ranks.begin(), ranks.end(), 0);
  EXPECT_TRUE(sum.eq(total).all().item<bool>()) << sum << " is not " << total;
}

// Makes the same groups as groups() in python_rank.py, in the same order.
void be_ours_in_groups(const World& world, const char* backend) {
  auto group =
      init_process_group(backend, {.timeout = std::chrono::seconds(40)});
  const int size = world.size;
  std::vector<int> everyone(size);
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto make = [](const std::vector<int>& ranks) {
    expect_sum_of_ranks(new_group(ranks), ranks);
  };
  make(everyone);
  make({0, size - 1});
  make({size - 1});
  make({0});
  make({everyone.begin() + 1, everyone.end()});
  make({everyone.begin(), everyone.end() - 1});
  // This group has another device map and another timeout.
  expect_sum_of_ranks(
      new_group({}, {.timeout = std::chrono::seconds(35), .backend = backend}),
      everyone);
  expect_sum_of_ranks(new_subgroups(size), everyone);
  if (size == 4) {
    expect_sum_of_ranks(new_subgroups(2), world.rank < 2
                                              ? std::vector<int>{0, 1}
                                              : std::vector<int>{2, 3});
    expect_sum_of_ranks(
        new_subgroups_by_enumeration({{0, 3}, {1, 2}}),
        world.rank % 3 == 0 ? std::vector<int>{0, 3} : std::vector<int>{1, 2});
  }
  make(everyone);
  barrier();
}

// Ranks in `python_ranks` are Python's, all others are ours.
void stand_together(const World& world, const std::vector<int>& python_ranks,
                    const char* part,
                    void (*ours)(const World&, const char* backend),
                    const Meeting& meeting = kGloo) {
  if (!std::filesystem::exists(meeting.python)) {
    GTEST_SKIP() << "no Python at " << meeting.python;
  }
  if (std::ranges::count(python_ranks, world.rank)) {
    be_python(world, part, meeting);
  } else {
    ours(world, meeting.backend);
  }
}

WORLD_TEST(PythonRank, JoinsAGroupThatOursHosts, 2, 3) {
  stand_together(world, {world.size - 1}, "collectives", be_ours);
}

WORLD_TEST(PythonRank, HostsAGroupThatOursJoin, 2, 3) {
  stand_together(world, {0}, "collectives", be_ours);
}

WORLD_TEST(PythonRank, IsLastInNewGroupsOfOurs, 2, 3, 4) {
  stand_together(world, {world.size - 1}, "groups", be_ours_in_groups);
}

WORLD_TEST(PythonRank, IsFirstInNewGroupsOfOurs, 2, 3) {
  stand_together(world, {0}, "groups", be_ours_in_groups);
}

// Each pair of new_subgroups() holds one rank of each language.
WORLD_TEST(PythonRank, StandsBesideOursInEveryNewGroup, 4) {
  stand_together(world, {0, 2}, "groups", be_ours_in_groups);
}

WORLD_TEST(PythonRank, SharesMemoryWithOursAsTheLastRank, 2, 3) {
  stand_together(world, {world.size - 1}, "collectives", be_ours, kOwn);
}

WORLD_TEST(PythonRank, SharesMemoryWithOursAsTheFirstRank, 2, 3) {
  stand_together(world, {0}, "collectives", be_ours, kOwn);
}

WORLD_TEST(PythonRank, SharesMemoryWithOursInEveryNewGroup, 4) {
  stand_together(world, {0, 2}, "groups", be_ours_in_groups, kOwn);
}

}  // namespace
}  // namespace lockstep::internal
