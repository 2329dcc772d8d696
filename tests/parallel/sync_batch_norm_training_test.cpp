// Networks with SyncBatchNorm in DistributedDataParallel train like one process
// with BatchNorm on the whole batch.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/nn/convert_sync_batchnorm.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::Sequential;

constexpr int64_t kRows = 12;  // of the global batch
constexpr int kSteps = 10;
constexpr double kTrainedFloatBound = 1e-5;
constexpr double kTrainedDoubleBound = 1e-12;

Sequential make_net(at::ScalarType dtype,
                    std::optional<double> momentum = 0.1) {
  torch::manual_seed(1);
  using torch::nn::BatchNormOptions;
  Sequential net(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).bias(false)),
      BatchNorm2d(BatchNormOptions(4).momentum(momentum)), torch::nn::Tanh(),
      torch::nn::Flatten(), torch::nn::Linear(4 * 4 * 4, 8),
      BatchNorm1d(BatchNormOptions(8).momentum(momentum)), torch::nn::Tanh(),
      torch::nn::Linear(8, 1));
  net->to(dtype);
  return net;
}

// Takes rows of each rank. The losses are sums, so every sample has the same
// weight, however many a rank has.
template <typename Forward>
void train(Forward&& forward, Sequential& net, at::ScalarType dtype,
           int64_t begin, int64_t rows, int ranks) {
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(0.02).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    torch::manual_seed(1000 + step);
    auto x = torch::randn({kRows, 2, 6, 6}, torch::kDouble).to(dtype);
    auto y = torch::randn({kRows, 1}, torch::kDouble).to(dtype);
    optimizer.zero_grad();
    auto out = forward(x.narrow(0, begin, rows));
    auto loss = (out - y.narrow(0, begin, rows)).pow(2).sum() / kRows;
    // DDP divides by the number of ranks.
    (loss * ranks).backward();
    optimizer.step();
  }
}

void expect_same_training(const World& world, at::ScalarType dtype,
                          const std::vector<int64_t>& rows,
                          std::optional<double> momentum = 0.1) {
  auto single = make_net(dtype, momentum);
  train([&](const torch::Tensor& x) { return single->forward(x); }, single,
        dtype, 0, kRows, 1);

  auto net = make_net(dtype, momentum);
  DistributedDataParallel<Sequential> model(
      nn::convert_sync_batchnorm(net),
      {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-4});
  int64_t begin = 0;
  for (int rank = 0; rank < world.rank; ++rank) {
    begin += rows[static_cast<size_t>(rank)];
  }
  train([&](const torch::Tensor& x) { return model(x); }, net, dtype, begin,
        rows[static_cast<size_t>(world.rank)], world.size);

  double bound = dtype == at::kFloat ? kTrainedFloatBound : kTrainedDoubleBound;
  auto compare = [&](const auto& have, const auto& want) {
    for (const auto& item : want) {
      auto error = (have[item.key()] - item.value()).abs().max();
      EXPECT_LE(error.template item<double>(), bound) << item.key();
      std::vector<at::Tensor> all(static_cast<size_t>(world.size));
      for (auto& each : all) each = torch::empty_like(item.value());
      all_gather(all, have[item.key()].detach());
      for (auto& each : all) EXPECT_TRUE(each.equal(all[0])) << item.key();
    }
  };
  compare(net->named_parameters(), single->named_parameters());
  compare(net->named_buffers(), single->named_buffers());
}

WORLD_TEST(SyncBatchNormTraining, EqualsOneProcessOnTheWholeBatch, 1, 2, 3) {
  auto group = init_process_group();
  std::vector<int64_t> rows(static_cast<size_t>(world.size),
                            kRows / world.size);
  expect_same_training(world, at::kFloat, rows);
  expect_same_training(world, at::kDouble, rows);
}

WORLD_TEST(SyncBatchNormTraining, EqualsItOverGloo, 2) {
  auto group = init_process_group("gloo");
  expect_same_training(world, at::kDouble, {6, 6});
}

WORLD_TEST(SyncBatchNormTraining, EqualsItWithUnequalParts, 2, 3) {
  auto group = init_process_group();
  expect_same_training(world, at::kDouble,
                       world.size == 2 ? std::vector<int64_t>{3, 9}
                                       : std::vector<int64_t>{1, 7, 4});
}

WORLD_TEST(SyncBatchNormTraining, EqualsItWithNoSamplesOnOneRank, 2, 3) {
  auto group = init_process_group();
  expect_same_training(world, at::kDouble,
                       world.size == 2 ? std::vector<int64_t>{12, 0}
                                       : std::vector<int64_t>{5, 0, 7});
}

WORLD_TEST(SyncBatchNormTraining, EqualsItWithCumulativeStatistics, 2) {
  auto group = init_process_group();
  expect_same_training(world, at::kDouble, {5, 7}, std::nullopt);
}

// Tests what forward writes: its input, the norm's result, a reference
// argument; and what the caller writes: the result, which is a view.
template <typename Norm>
struct WritesNetImpl : torch::nn::Module {
  WritesNetImpl() {
    torch::manual_seed(8);
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", Norm(4));
    second = register_module("second", torch::nn::Linear(4, 2));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, at::Tensor& state) {
    const torch::Tensor h = norm(first(x.mul_(0.5)));
    h.relu_();
    state = state.defined() ? state + h : h;
    return second(state).t();
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, int64_t begin, int64_t rows) {
    torch::manual_seed(9);
    const auto all = torch::randn({kRows, 3}, torch::kDouble);
    at::Tensor state, x = all.narrow(0, begin, rows).clone();
    auto loss = call(x, state).mul_(2).pow(2).sum();
    at::Tensor next = x + 1;
    loss = loss + call(next, state).sum() + state.pow(2).sum();
    return loss / kRows;
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  Norm norm{nullptr};
};
using PlainWrites = WritesNetImpl<BatchNorm1d>;
using SyncWrites = WritesNetImpl<nn::SyncBatchNorm1d>;

WORLD_TEST(SyncBatchNormTraining, WhatForwardWritesIsAsInOneProcess, 1, 2, 3) {
  auto group = init_process_group();
  PlainWrites plain;
  PlainWrites::loss(
      [&](at::Tensor& x, at::Tensor& state) { return plain.forward(x, state); },
      0, kRows)
      .backward();
  const int64_t rows = kRows / world.size;
  const auto train = [&](auto model) {
    (SyncWrites::loss(
         [&](at::Tensor& x, at::Tensor& state) { return model(x, state); },
         rows * world.rank, rows) *
     world.size)
        .backward();
    for (const auto& item : model->named_parameters()) {
      const auto& got = item.value();
      if (got.numel() == 0) continue;
      auto want = plain.named_parameters()[item.key()].grad();
      if (const auto* layout = layout_of(got)) {
        want = part_of(want, *layout).view(got.sizes());
      }
      EXPECT_TRUE(torch::allclose(got.grad(), want, 1e-10, 1e-12))
          << item.key();
    }
    for (const auto& item : model->named_buffers()) {
      EXPECT_TRUE(torch::allclose(
          item.value(), plain.named_buffers()[item.key()], 1e-10, 1e-12))
          << item.key();
    }
  };
  train(DistributedDataParallel(std::make_shared<SyncWrites>()));
  for (const bool shared : {true, false}) {
    train(
        FullyShard(std::make_shared<SyncWrites>(), {.shared_memory = shared}));
  }
}

WORLD_TEST(SyncBatchNormTraining, AForwardThatWritesItsWeightIsRefused, 2) {
  auto group = init_process_group();
  struct Writes : torch::nn::Module {
    Writes() {
      norm = register_module("norm", nn::SyncBatchNorm1d(3));
      to(torch::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) {
      {
        const torch::NoGradGuard no_grad;
        norm->weight.mul_(x.mean());
      }
      return norm(x);
    }
    nn::SyncBatchNorm1d norm{nullptr};
  };
  const auto x = torch::full({2, 3}, world.rank + 2, torch::kDouble);
  DistributedDataParallel model(std::make_shared<Writes>());
  EXPECT_THAT(testing::message_of([&] { model(x).sum().backward(); }),
              ::testing::HasSubstr("has written parameter 'norm.weight'"));
  FullyShard unit(std::make_shared<Writes>(), {.shared_memory = false});
  EXPECT_THAT(
      testing::message_of([&] { unit(x).sum().backward(); }),
      ::testing::HasSubstr("the full parameter norm.weight was written"));
}

}  // namespace
}  // namespace lockstep::internal
