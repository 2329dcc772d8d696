#include "lockstep/parallel/ddp/buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;

std::vector<torch::Tensor> tensors(const std::vector<int64_t>& sizes) {
  std::vector<torch::Tensor> list;
  for (auto size : sizes) list.push_back(torch::ones({size}));
  return list;
}

TEST(Buckets, EndWithTheTensorThatReachesTheLimit) {
  // A number has 4 bytes; the first bucket takes 8 bytes, the others 16.
  auto list = tensors({1, 1, 1, 2, 1, 1, 9, 1});
  auto buckets = assign_buckets(list, {0, 1, 2, 3, 4, 5, 6, 7}, {8, 16});
  EXPECT_THAT(buckets, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3, 4),
                                   ElementsAre(5, 6), ElementsAre(7)));
}

TEST(Buckets, HoldOneDtypeEach) {
  std::vector<torch::Tensor> list{
      torch::ones({1}), torch::ones({1}, torch::kDouble), torch::ones({1}),
      torch::ones({1}, torch::kDouble)};
  EXPECT_THAT(assign_buckets(list, {3, 2, 1, 0}, {1 << 20, 1 << 20}),
              ElementsAre(ElementsAre(3, 1), ElementsAre(2, 0)));
}

TEST(Buckets, EveryTensorStandsInExactlyOne) {
  auto list = tensors({5, 1, 8, 2, 2, 100, 3});
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
}  // namespace lockstep::internal
