#include "lockstep/parallel/ddp/buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using Buckets = std::vector<std::vector<size_t>>;

std::vector<NamedParameter> parameters(const std::vector<int64_t>& sizes) {
  std::vector<NamedParameter> list;
  for (auto size : sizes) {
    list.push_back({"p" + std::to_string(list.size()), torch::ones({size})});
  }
  return list;
}

TEST(Buckets, FillUpToTheLimitsInTheGivenOrder) {
  // 4 bytes a number: first bucket 8 bytes, others 16.
  auto list = parameters({1, 1, 1, 3, 1, 9, 1});
  auto buckets = assign_buckets(list, {0, 1, 2, 3, 4, 5, 6}, {8, 16});
  EXPECT_THAT(buckets,
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4),
                          ElementsAre(5), ElementsAre(6)));
}

TEST(Buckets, HoldOneDtypeEach) {
  std::vector<NamedParameter> list{{"a", torch::ones({1})},
                                   {"b", torch::ones({1}, torch::kDouble)},
                                   {"c", torch::ones({1})},
                                   {"d", torch::ones({1}, torch::kDouble)}};
  EXPECT_THAT(assign_buckets(list, {3, 2, 1, 0}, {1 << 20, 1 << 20}),
              ElementsAre(ElementsAre(3, 1), ElementsAre(2, 0)));
}

TEST(Buckets, EveryParameterStandsInExactlyOne) {
  auto list = parameters({5, 1, 8, 2, 2, 100, 3});
  for (int64_t cap : {4, 16, 64, 1000}) {
    std::vector<size_t> seen;
    for (auto& bucket :
         assign_buckets(list, {6, 0, 5, 1, 4, 2, 3}, {cap, cap})) {
      seen.insert(seen.end(), bucket.begin(), bucket.end());
    }
    EXPECT_THAT(seen, ElementsAre(6, 0, 5, 1, 4, 2, 3)) << cap;
  }
}

}  // namespace
}  // namespace lockstep
