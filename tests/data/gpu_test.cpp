// A loader that copies its batches to a GPU; skips if LibTorch sees none.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/samplers.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::internal {
namespace {

// Every batch is whole when the loop uses it, although copies run ahead on a
// stream of their own.
TEST(DataLoaderGpu, CopiesAhead) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "needs a GPU, and LibTorch sees none";
  }
  const int64_t samples = 64, size = 1 << 18;
  const auto rows = torch::arange(samples).view({samples, 1});
  TensorDataset dataset(rows.expand({samples, size}).contiguous(), rows);
  SequentialSampler sampler(samples);
  for (int64_t workers : {0, 1, 3}) {
    for (bool pin : {false, true}) {
      DataLoader loader(dataset, sampler,
                        {.batch_size = 8,
                         .device = at::kCUDA,
                         .num_workers = workers,
                         .pin_memory = pin});
      for (int pass = 0; pass < 3; ++pass) {
        auto wrong = torch::zeros({}, at::kCUDA);
        int64_t next = 0;
        for (auto& batch : loader) {
          ASSERT_TRUE(batch.data.is_cuda());
          const auto expected =
              torch::arange(
                  next, next + 8,
                  torch::TensorOptions(torch::kLong).device(at::kCUDA))
                  .view({8, 1});
          wrong += batch.data.ne(expected).sum();
          wrong += batch.target.ne(expected).sum();
          next += 8;
        }
        EXPECT_EQ(wrong.item<float>(), 0) << workers << " workers";
      }
    }
  }
}

// Tensors that a dataset makes on the GPU were read before they were made, and
// batches for the CPU were delivered before they were copied.
TEST(DataLoaderGpu, WaitsForWhatTheDatasetMakesOnTheGpu) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "needs a GPU, and LibTorch sees none";
  }
  struct Sums {
    at::Tensor get_batch(c10::ArrayRef<size_t> indices) const {
      at::Tensor sum = torch::zeros({1 << 22}, at::kCUDA);
      for (int i = 0; i < 50; ++i) {
        sum += static_cast<double>(indices.front());
      }
      return sum;
    }
    size_t size() const { return 16; }
  };
  Sums sums;
  SequentialSampler sampler(16);
  for (const auto device : {at::kCUDA, at::kCPU}) {
    for (const int64_t workers : {0, 1, 3}) {
      DataLoader loader(sums, sampler,
                        {.device = device, .num_workers = workers});
      int64_t next = 0;
      for (auto& batch : loader) {
        EXPECT_EQ(batch.device().type(), device);
        EXPECT_TRUE(batch.eq(50 * next++).all().item<bool>()) << workers;
      }
    }
  }
}

// The memory of a sparse tensor could not be given to the loop's stream.
TEST(DataLoaderGpu, CopiesSparseBatches) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "needs a GPU, and LibTorch sees none";
  }
  struct Sparse {
    std::pair<at::Tensor, at::Tensor> get_batch(c10::ArrayRef<size_t>) const {
      return {torch::eye(3).to_sparse(), torch::eye(3).to_sparse_csr()};
    }
    size_t size() const { return 4; }
  };
  Sparse sparse;
  SequentialSampler sampler(4);
  DataLoader loader(sparse, sampler, {.device = at::kCUDA, .num_workers = 1});
  for (auto& [coo, csr] : loader) {
    EXPECT_TRUE(torch::equal(coo.to_dense().cpu(), torch::eye(3)));
    EXPECT_TRUE(torch::equal(csr.to_dense().cpu(), torch::eye(3)));
  }
}

}  // namespace
}  // namespace lockstep::internal
