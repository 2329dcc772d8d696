#include "lockstep/data/tensor_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TensorDataset, ABatchHoldsTheRowsThatWereAskedFor) {
  TensorDataset dataset(torch::arange(12).view({4, 3}), torch::arange(4));
  EXPECT_EQ(dataset.size(), 4u);
  auto batch = dataset.get_batch({3, 0, 3});
  EXPECT_TRUE(torch::equal(
      batch.data, torch::tensor({9, 10, 11, 0, 1, 2, 9, 10, 11}, torch::kLong)
                      .view({3, 3})));
  EXPECT_TRUE(
      torch::equal(batch.target, torch::tensor({3, 0, 3}, torch::kLong)));
}

TEST(TensorDataset, ABatchIsACopyThatMayBeChanged) {
  TensorDataset dataset(torch::ones({4, 2}), torch::zeros({4}));
  dataset.get_batch({1}).data.zero_();
  dataset.get_batch({0, 1, 2, 3}).data.zero_();
  EXPECT_EQ(dataset.data().sum().item<double>(), 8.0);
}

TEST(TensorDataset, RefusesTensorsThatAreNotRowsOfSamples) {
  EXPECT_THAT([] { TensorDataset(torch::ones({4, 2}), torch::zeros({3})); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("data has 4 rows and target 3")));
  EXPECT_THAT(
      [] { TensorDataset(torch::tensor(1.0), torch::zeros({1})); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("data is a scalar")));
  EXPECT_THAT(
      [] { TensorDataset(torch::ones({1}), torch::Tensor()); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("target is undefined")));
}

TEST(TensorDataset, RefusesIndicesOutsideTheDataset) {
  TensorDataset dataset(torch::ones({4, 2}), torch::zeros({4}));
  EXPECT_THROW(dataset.get_batch({4}), c10::Error);
  EXPECT_THROW(dataset.get_batch({static_cast<size_t>(-1)}), c10::Error);
}

}  // namespace
}  // namespace lockstep::internal
