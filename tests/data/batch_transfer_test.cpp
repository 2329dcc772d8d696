// Pinned memory and copies to a device. Without a GPU the device is `meta`,
// which has tensors and no memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/samplers.h"
#include "lockstep/data/tensor_dataset.h"

namespace batch_transfer_test_user {

struct Batch {
  at::Tensor tokens;
  std::string name;
};
void for_each_tensor(Batch& batch,
                     const std::function<void(at::Tensor&)>& visit) {
  visit(batch.tokens);
}

struct WithoutFunction {
  at::Tensor tokens;
};

}  // namespace batch_transfer_test_user

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(BatchTransfer, FindsTheTensorsOfABatch) {
  using User = batch_transfer_test_user::Batch;
  using Nested =
      std::map<std::string,
               std::tuple<std::pair<at::Tensor, float>, std::vector<User>,
                          std::array<torch::data::Example<>, 1>,
                          torch::data::TensorExample, std::vector<bool>>>;
  const auto one = [] { return torch::ones({1}); };
  Nested batch;
  batch["x"] = {{one(), 2.0f},
                {User{one(), "a"}, User{one(), "b"}},
                {torch::data::Example<>(one(), one())},
                torch::data::TensorExample(one()),
                {true}};
  int found = 0;
  const auto visit = [&](at::Tensor& tensor) {
    ++found;
    tensor = tensor + 1;
  };
  visit_batch(batch, visit);
  EXPECT_EQ(found, 6);
  EXPECT_EQ(std::get<1>(batch["x"])[1].tokens.item<float>(), 2);
  static_assert(kFindsTensors<Nested>);
  static_assert(!kFindsTensors<batch_transfer_test_user::WithoutFunction>);
  static_assert(
      !kFindsTensors<std::vector<
          std::pair<int, batch_transfer_test_user::WithoutFunction>>>);
  at::Tensor undefined;
  visit_batch(undefined, visit);
  EXPECT_EQ(found, 6);
}

TEST(BatchTransfer, BatchesAreOnTheDevice) {
  TensorDataset dataset(torch::ones({10, 3}), torch::zeros({10}));
  SequentialSampler sampler(10);
  for (int64_t workers : {0, 2}) {
    DataLoader meta(
        dataset, sampler,
        {.batch_size = 4, .device = at::kMeta, .num_workers = workers});
    int64_t batches = 0;
    for (auto& batch : meta) {
      EXPECT_TRUE(batch.data.is_meta());
      EXPECT_TRUE(batch.target.is_meta());
      EXPECT_EQ(batch.data.size(1), 3);
      ++batches;
    }
    EXPECT_EQ(batches, 3);
    DataLoader cpu(
        dataset, sampler,
        {.batch_size = 4, .device = at::kCPU, .num_workers = workers});
    EXPECT_TRUE(cpu.begin()->data.is_cpu());
  }
}

TEST(BatchTransfer, RefusesWhatCannotBe) {
  TensorDataset dataset(torch::ones({10, 3}), torch::zeros({10}));
  SequentialSampler sampler(10);
  EXPECT_THAT(
      [&] {
        DataLoader(dataset, sampler, {.device = at::Device(at::kCUDA, 99)});
      },
      ThrowsMessage<std::invalid_argument>(
          HasSubstr("the device is cuda:99, but this LibTorch finds no such")));
  const auto collate = [](const torch::data::Example<>& batch) {
    return batch_transfer_test_user::WithoutFunction{batch.data};
  };
  EXPECT_THAT(
      [&] { DataLoader(dataset, sampler, {.device = at::kMeta}, collate); },
      ThrowsMessage<std::invalid_argument>(HasSubstr(
          "device is given, but the loader cannot find the tensors")));
  EXPECT_THAT(
      [&] { DataLoader(dataset, sampler, {.pin_memory = true}, collate); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("pin_memory is given")));
  EXPECT_NO_THROW(DataLoader(dataset, sampler, {}, collate));
}

TEST(BatchTransfer, PinsOnlyWithAGpu) {
  TensorDataset dataset(torch::ones({10, 3}), torch::zeros({10}));
  SequentialSampler sampler(10);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(
        dataset, sampler,
        {.batch_size = 4, .num_workers = workers, .pin_memory = true});
    auto first = loader.begin();
    EXPECT_EQ(first->data.is_pinned(), torch::cuda::is_available());
    EXPECT_EQ(first->data.sum().item<float>(), 12);
  }
}

}  // namespace
}  // namespace lockstep::internal
