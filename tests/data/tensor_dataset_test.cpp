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

// Rows are copied without index_select where that is possible: the result is
// the same for tensors of any kind.
TEST(TensorDataset, ABatchIsWhatIndexSelectReturns) {
  const at::Tensor base = torch::randn({6, 4, 3});
  const std::vector<at::Tensor> kinds{
      base,
      base.to(torch::kHalf),
      base.to(torch::kDouble),
      base.gt(0),
      torch::complex(base, base + 1),
      torch::complex(base, base + 1).conj(),
      torch::complex(base, base + 1).conj().select(2, 0),
      base.transpose(1, 2),
      base.slice(0, 0, 6, 1).slice(1, 0, 4, 2),
      base.permute({2, 0, 1}),
      base.slice(0, 1, 6),
      torch::empty({6, 0}),
      torch::arange(6),
      torch::arange(6).expand({6, 6}),
      torch::_efficientzerotensor({6, 2}),
      base.to_sparse(),
      base.clone().requires_grad_()};
  for (const at::Tensor& rows : kinds) {
    SCOPED_TRACE(rows.toString());
    TensorDataset dataset(rows, rows);
    for (const std::vector<size_t>& indices :
         {std::vector<size_t>{0, 1, 2}, {2, 0, 2}, {1, 2, 0, 1, 2}, {}, {2}}) {
      const std::vector<int64_t> numbers(indices.begin(), indices.end());
      const at::Tensor expected =
          rows.index_select(0, torch::tensor(numbers, torch::kLong));
      const auto batch = dataset.get_batch(indices);
      for (const at::Tensor& actual : {batch.data, batch.target}) {
        EXPECT_EQ(actual.sizes(), expected.sizes());
        EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
        EXPECT_EQ(actual.device(), expected.device());
        EXPECT_EQ(actual.layout(), expected.layout());
        EXPECT_EQ(actual.requires_grad(), expected.requires_grad());
        const auto dense = [](const at::Tensor& tensor) {
          return tensor.to_dense().resolve_conj();
        };
        EXPECT_TRUE(torch::equal(dense(actual), dense(expected)));
      }
    }
  }
}

// Large batches are gathered by LibTorch's threads, if there are several.
TEST(TensorDataset, LargeBatchesAreTheSame) {
  const at::Tensor rows = torch::arange(40 * 20000).view({40, 20000});
  TensorDataset dataset(rows, rows);
  for (const std::vector<size_t>& indices :
       {std::vector<size_t>{39, 3, 4, 5, 0, 12, 30, 2},
        {1, 2, 3, 4, 5, 6, 7, 8}}) {
    const std::vector<int64_t> numbers(indices.begin(), indices.end());
    EXPECT_TRUE(torch::equal(
        dataset.get_batch(indices).data,
        rows.index_select(0, torch::tensor(numbers, torch::kLong))));
  }
}

// The gradient of a batch reaches a dataset that requires one.
TEST(TensorDataset, IsDifferentiable) {
  at::Tensor rows = torch::ones({3, 2}).requires_grad_();
  TensorDataset dataset(rows, torch::zeros({3}));
  dataset.get_batch({2, 2, 0}).data.sum().backward();
  EXPECT_TRUE(torch::equal(
      rows.grad(),
      torch::tensor({1.0f, 1.0f, 0.0f, 0.0f, 2.0f, 2.0f}).view({3, 2})));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(dataset.get_batch({1}).data.requires_grad());
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
  // Also at the end of indices that follow each other.
  EXPECT_THROW(dataset.get_batch({2, 3, 4}), c10::Error);
  EXPECT_THAT(
      [&] { dataset.get_batch({1, 7}); },
      ThrowsMessage<c10::IndexError>(HasSubstr(
          "TensorDataset: index 7 is outside of a dataset of 4 samples")));
  TensorDataset empty(torch::ones({0, 2}), torch::zeros({0}));
  EXPECT_THROW(empty.get_batch({0}), c10::Error);
  EXPECT_EQ(empty.get_batch({}).data.sizes(), (c10::IntArrayRef{0, 2}));
}

}  // namespace
}  // namespace lockstep::internal
