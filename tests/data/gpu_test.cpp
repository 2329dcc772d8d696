// A loader that copies its batches to a GPU; skips if LibTorch sees none.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/sequential_sampler.h"
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

}  // namespace
}  // namespace lockstep::internal
