#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/zero/partition.h"
#include "lockstep/parallel/zero/updated_parameters.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

std::vector<at::Tensor> of_sizes(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (int64_t size : sizes) tensors.push_back(torch::empty({size}));
  return tensors;
}

TEST(Partition, LargeParametersAreCutWhereVectorsEnd) {
  Partition partition(3, true);
  const auto ranges = partition.add(of_sizes({3 * 4096 + 100}));
  EXPECT_EQ(ranges[0], (Ranges{{0, 4096}, {4096, 8192}, {8192, 12388}}));
}

TEST(Partition, SmallParametersGoToWhoHasLeast) {
  Partition partition(2, true);
  const auto ranges = partition.add(of_sizes({10, 1000, 700, 400}));
  // Rank 0 gets 1000; rank 1 gets 700 and 400; rank 0 gets 10.
  EXPECT_EQ(ranges[1], (Ranges{{0, 1000}, {1000, 1000}}));
  EXPECT_EQ(ranges[2], (Ranges{{0, 0}, {0, 700}}));
  EXPECT_EQ(ranges[3], (Ranges{{0, 0}, {0, 400}}));
  EXPECT_EQ(ranges[0], (Ranges{{0, 10}, {10, 10}}));
  // Later parameters continue from there: rank 0 has 1010, rank 1 has 1100.
  EXPECT_EQ(partition.add(of_sizes({5}))[0], (Ranges{{0, 5}, {5, 5}}));
}

TEST(Partition, UncutParametersStayWhole) {
  Partition partition(2, false);
  const auto ranges = partition.add(of_sizes({100000, 90000, 20000}));
  EXPECT_EQ(ranges[0], (Ranges{{0, 100000}, {100000, 100000}}));
  EXPECT_EQ(ranges[1], (Ranges{{0, 0}, {0, 90000}}));
  EXPECT_EQ(ranges[2], (Ranges{{0, 0}, {0, 20000}}));
}

TEST(Partition, ParametersWithGapsAreNotCut) {
  Partition partition(2, true);
  const auto gaps = torch::empty({200, 400}).narrow(1, 0, 200);
  EXPECT_EQ(partition.add({gaps})[0], (Ranges{{0, 40000}, {40000, 40000}}));
}

TEST(Partition, EveryElementHasOneOwner) {
  for (int world_size : {1, 2, 3, 7}) {
    Partition partition(world_size, true);
    const std::vector<int64_t> sizes{0, 1, 63, 4096, 28672, 28671, 1000003};
    const auto all = partition.add(of_sizes(sizes));
    for (size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_EQ(all[i].size(), static_cast<size_t>(world_size));
      int64_t end = 0;
      for (const Range& range : all[i]) {
        EXPECT_EQ(range.begin, end);
        end = range.end;
      }
      EXPECT_EQ(end, sizes[i]);
    }
  }
}

// A parameter of one rank was padded to as many places as there are ranks.
WORLD_TEST(ParameterGather, ALongPartOfOneRankIsNotPadded, 1, 2, 4, 8) {
  auto group = init_process_group();
  std::vector<at::Tensor> parameters{torch::zeros(10'000), torch::zeros(10),
                                     torch::zeros({3, 4}), torch::zeros(7)};
  const auto ranges = Partition(world.size, false).add(parameters);
  ParameterGather gather(parameters, ranges, group);
  EXPECT_LT(gather.buffer_bytes(),
            2 * 40'200 + world.size * ParameterGather::kLeast);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (ranges[i][static_cast<size_t>(world.rank)].size() > 0) {
      parameters[i].fill_(static_cast<double>(i + 1));
    }
  }
  gather.run();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].eq(static_cast<double>(i + 1)).all().item<bool>())
        << i;
  }
}

}  // namespace
}  // namespace lockstep::internal
