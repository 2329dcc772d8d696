// The simulated device keeps CUDA's contract: streams, events, memory, copies,
// random numbers and errors.

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal {
namespace {

class SimulatedDevice : public ::testing::Test {
 protected:
  void SetUp() override { simulated_cuda::restart(1); }

  // Until this is set, tasks that blocks() has enqueued do not end.
  std::atomic<bool> released_{false};
  void block(const c10::Stream& stream) {
    simulated_cuda::enqueue(stream, [this] {
      while (!released_) std::this_thread::yield();
    });
  }

  const torch::Device device_{"cuda:0"};
  const c10::impl::VirtualGuardImpl cuda_{torch::kCUDA};
  const c10::Stream main_ = cuda_.getStream(device_);
  const c10::Stream side_ = cuda_.getStreamFromGlobalPool(device_, false);
};

TEST_F(SimulatedDevice, IsCudaForLibTorch) {
  EXPECT_TRUE(torch::cuda::is_available());
  EXPECT_EQ(torch::cuda::device_count(), 4);
  EXPECT_EQ(at::getAccelerator(), torch::kCUDA);
  EXPECT_EQ(simulated_cuda::physical_index(3), 3);
  EXPECT_EQ(torch::ones({2}, torch::kCUDA).device(), device_);
  const c10::DeviceGuard guard(torch::Device("cuda:2"));
  EXPECT_EQ(torch::ones({2}, torch::kCUDA).device().index(), 2);
  EXPECT_EQ(at::accelerator::getDeviceIndex(), 2);
}

TEST_F(SimulatedDevice, CurrentDeviceAndStreamBelongToTheThread) {
  const c10::StreamGuard guard(side_);
  std::thread([&] {
    EXPECT_EQ(cuda_.getStream(device_), main_);
    cuda_.setDevice(torch::Device("cuda:3"));
  }).join();
  EXPECT_EQ(cuda_.getStream(device_), side_);
  EXPECT_EQ(cuda_.getDevice(), device_);
  EXPECT_NE(cuda_.getStream(torch::Device("cuda:1")).id(), side_.id());
}

TEST_F(SimulatedDevice, PoolsGiveTheSameStreamAgain) {
  const c10::Stream first = cuda_.getStreamFromGlobalPool(device_, false);
  for (int i = 1; i < 32; ++i) {
    EXPECT_NE(cuda_.getStreamFromGlobalPool(device_, false), first);
  }
  EXPECT_NE(cuda_.getStreamFromGlobalPool(device_, true), first);
  EXPECT_EQ(cuda_.getStreamFromGlobalPool(device_, false), first);
}

TEST_F(SimulatedDevice, OperationsDoNotWait) {
  block(main_);
  const auto waits = simulated_cuda::counters().host_waits;
  auto net = torch::nn::Sequential(
      torch::nn::Linear(4, 4),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})),
      torch::nn::Dropout(0.5));
  const auto x = torch::randn({3, 4}, device_);
  for (auto& parameter : net->parameters()) {
    parameter.set_data(torch::ones_like(parameter, device_));
  }
  net->forward(x).sum().backward();
  torch::embedding(
      x, torch::ones({2}, torch::dtype(torch::kLong).device(device_)));
  EXPECT_FALSE(cuda_.queryStream(main_));
  EXPECT_EQ(simulated_cuda::counters().host_waits, waits);
  released_ = true;
  EXPECT_EQ(net->parameters()[0].grad().sizes(), torch::IntArrayRef({4, 4}));
  cuda_.synchronizeStream(main_);
  EXPECT_TRUE(cuda_.queryStream(main_));
  EXPECT_EQ(simulated_cuda::counters().host_waits, waits + 1);
}

TEST_F(SimulatedDevice, EventsHaveTheStateOfTheirRecord) {
  c10::Event event(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  EXPECT_TRUE(event.query());
  block(side_);
  event.record(side_);
  EXPECT_FALSE(event.query());
  event.block(main_);
  const auto x = torch::ones({2}, device_);
  EXPECT_FALSE(cuda_.queryStream(main_));
  EXPECT_TRUE(cuda_.queryStream(cuda_.getStream(torch::Device("cuda:1"))));
  released_ = true;
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(x.sum().item<float>(), 2);
  c10::Event later(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  later.record(main_);
  later.synchronize();
  EXPECT_GE(event.elapsedTime(later), 0);
  c10::Event other(torch::kCUDA);
  other.record(main_);
  EXPECT_THROW(other.record(cuda_.getStream(torch::Device("cuda:1"))),
               c10::Error);
}

// A stream that is held back is asked only whether it has arrived.
TEST_F(SimulatedDevice, StreamsProgressWhenNobodyWaits) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    simulated_cuda::restart(seed);
    for (const auto& stream : {main_, side_}) {
      const c10::StreamGuard guard(stream);
      const auto x = torch::ones({2}, device_) + 1;
      while (!cuda_.queryStream(stream)) std::this_thread::yield();
      EXPECT_EQ(simulated_cuda::memory_of(x)[1].item<float>(), 2);
    }
  }
}

TEST_F(SimulatedDevice, LongQueuesRun) {
  auto x = torch::zeros({1}, device_);
  for (int i = 0; i < 5000; ++i) x.add_(1);
  EXPECT_EQ(x.item<float>(), 5000);
}

TEST_F(SimulatedDevice, NewMemoryIsNan) {
  EXPECT_TRUE(torch::empty({5}, device_).isnan().all().item<bool>());
  for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    {
      const auto used = torch::ones({5}, torch::dtype(type).device(device_));
    }
    const auto reused = torch::empty({5}, torch::dtype(type).device(device_));
    EXPECT_TRUE(reused.isnan().all().item<bool>()) << type;
  }
}

TEST_F(SimulatedDevice, OnlyTheStreamOfABlockGetsItAgain) {
  auto x = torch::ones({100}, device_);
  const void* const address = x.data_ptr();
  x = torch::Tensor();
  {
    const c10::StreamGuard guard(side_);
    EXPECT_NE(torch::empty({100}, device_).data_ptr(), address);
  }
  EXPECT_EQ(torch::empty({100}, device_).data_ptr(), address);
}

TEST_F(SimulatedDevice, RecordedStreamsDelayReuse) {
  auto x = torch::ones({100}, device_);
  const void* const address = x.data_ptr();
  block(side_);
  x.record_stream(side_);
  x = torch::Tensor();
  EXPECT_NE(torch::empty({100}, device_).data_ptr(), address);
  released_ = true;
  cuda_.synchronizeStream(side_);
  std::vector<torch::Tensor> later;
  bool found = false;
  for (int i = 0; i < 2; ++i) {
    later.push_back(torch::empty({100}, device_));
    found = found || later.back().data_ptr() == address;
  }
  EXPECT_TRUE(found);
}

TEST_F(SimulatedDevice, MemoryIsCounted) {
  const auto before = simulated_cuda::counters();
  auto x = torch::ones({1000}, device_);
  EXPECT_EQ(simulated_cuda::counters().live_blocks, before.live_blocks + 1);
  EXPECT_EQ(simulated_cuda::counters().live_bytes, before.live_bytes + 4096);
  const auto statistics = at::accelerator::getDeviceStats(0);
  EXPECT_GE(statistics.allocated_bytes[0].current, 4096);
  x = torch::Tensor();
  EXPECT_EQ(simulated_cuda::counters().live_blocks, before.live_blocks);
  at::accelerator::emptyCache();
}

TEST_F(SimulatedDevice, PinnedMemoryIsKnown) {
  const auto pinned = torch::ones({4}).pin_memory();
  EXPECT_TRUE(pinned.is_pinned());
  EXPECT_TRUE(pinned.slice(0, 2).is_pinned());
  EXPECT_FALSE(torch::ones({4}).is_pinned());
  EXPECT_TRUE(pinned.is_cpu());
  EXPECT_TRUE(torch::ones({4}, device_)
                  .to(torch::kCPU, /*non_blocking=*/true)
                  .is_pinned());
  EXPECT_THROW(
      torch::ones({2}, torch::TensorOptions(device_).pinned_memory(true)),
      c10::Error);
}

TEST_F(SimulatedDevice, OnlyPinnedMemoryIsCopiedLater) {
  auto pinned = torch::ones({4}).pin_memory();
  auto pageable = torch::ones({4});
  block(main_);
  const auto from_pinned = pinned.to(device_, /*non_blocking=*/true);
  const auto from_pageable = pageable.to(device_, /*non_blocking=*/true);
  const auto converted =
      pinned.to(torch::TensorOptions(device_).dtype(torch::kHalf),
                /*non_blocking=*/true);
  pinned.fill_(5);
  pageable.fill_(5);
  // Freed memory stays what it is until the copy has run.
  pinned = torch::Tensor();
  const auto other = torch::zeros({4}).pin_memory();
  released_ = true;
  EXPECT_EQ(from_pinned.sum().item<float>(), 20);
  EXPECT_EQ(from_pageable.sum().item<float>(), 4);
  EXPECT_EQ(converted.sum().item<float>(), 4);
}

TEST_F(SimulatedDevice, CopiesConvertAndRearrange) {
  const auto x = torch::arange(6).view({2, 3});
  const auto on_device = x.t().to(device_, torch::kFloat);
  EXPECT_TRUE(on_device.cpu().equal(x.t().to(torch::kFloat)));
  auto wide = torch::zeros({2, 3, 2}, torch::Device("cuda:3"));
  wide.select(2, 1).copy_(on_device.t());
  EXPECT_TRUE(wide.cpu().select(2, 1).equal(x.to(torch::kFloat)));
  EXPECT_EQ(wide.cpu().select(2, 0).sum().item<float>(), 0);
  EXPECT_TRUE(wide.fill_(2)
                  .eq(torch::full({1}, 2, device_).cpu()[0])
                  .all()
                  .item<bool>());
}

TEST_F(SimulatedDevice, ResultsOfUnknownShapeWait) {
  const auto x = torch::tensor({0.F, 3.F, 0.F, 5.F}).to(device_);
  EXPECT_TRUE(x.nonzero().cpu().equal(torch::tensor({{1L}, {3L}})));
  EXPECT_EQ(x.masked_select(x > 0).sum().item<float>(), 8);
  EXPECT_EQ(x.index({x > 4}).numel(), 1);
  EXPECT_TRUE(x.equal(x.clone()));
  auto out = torch::empty({0}, device_);
  torch::add_out(out, x, x);
  EXPECT_EQ(out.sum().item<float>(), 16);
}

TEST_F(SimulatedDevice, StoragesCanBeReplacedAndGrow) {
  auto x = torch::ones({2}, device_);
  x.resize_({4});
  EXPECT_EQ(x.slice(0, 0, 2).sum().item<float>(), 2);
  auto y = torch::empty({0}, device_);
  y.set_(x.storage(), 1, {1}, {1});
  EXPECT_EQ(y.item<float>(), 1);
  EXPECT_EQ(torch::stack({x, x}).unfold(0, 2, 1).sizes().size(), 3U);
}

TEST_F(SimulatedDevice, SparseTensorsAreMadeAndAdded) {
  const auto dense = torch::tensor({{0.F, 2.F}, {3.F, 0.F}});
  const auto sparse = dense.to_sparse().to(device_);
  EXPECT_TRUE(sparse._values().is_cuda());
  EXPECT_TRUE((sparse + sparse).coalesce().to_dense().cpu().equal(dense * 2));
  auto sum = torch::zeros({2, 2}, device_);
  sum.add_(dense.to(device_).to_sparse());
  EXPECT_TRUE(sum.cpu().equal(dense));
  EXPECT_TRUE(sparse.clone().div_(2).cpu().to_dense().equal(dense / 2));
  EXPECT_TRUE(dense.to_sparse_csr().to(device_).to_dense().cpu().equal(dense));
  const auto weight = torch::ones({4, 2}, device_).requires_grad_();
  const auto rows = torch::tensor({1L, 1L}).to(device_);
  torch::embedding(weight, rows, -1, false, /*sparse=*/true).sum().backward();
  EXPECT_EQ(weight.grad().to_dense()[1][0].item<float>(), 2);
}

TEST_F(SimulatedDevice, ViewsShareMemory) {
  const auto x = torch::zeros({4, 2}, device_);
  torch::view_as_complex(x).fill_(c10::complex<float>(1, 2));
  EXPECT_EQ(x[3][1].item<float>(), 2);
  EXPECT_EQ(torch::view_as_real(torch::view_as_complex(x)).data_ptr(),
            x.data_ptr());
  EXPECT_EQ(x.view(torch::kInt)[0][0].item<int>(), 0x3f800000);
  EXPECT_EQ(x.t().unfold(0, 2, 1).sum().item<float>(), 12);
  const auto conjugate = torch::view_as_complex(x).conj();
  EXPECT_EQ(conjugate.cpu()[3].item<c10::complex<float>>(),
            c10::complex<float>(1, -2));
  EXPECT_EQ(torch::imag(conjugate).sum().item<float>(), -8);
}

TEST_F(SimulatedDevice, SoftmaxWidensHalfTypes) {
  const auto x = torch::randn({3, 5});
  const auto half = x.to(device_, torch::kHalf).requires_grad_();
  const auto result = half.softmax(1, torch::kFloat);
  EXPECT_EQ(result.scalar_type(), torch::kFloat);
  EXPECT_TRUE(result.cpu().allclose(x.softmax(1), 1e-2, 1e-2));
  (half.log_softmax(1, torch::kFloat) * result).sum().backward();
  EXPECT_EQ(half.grad().scalar_type(), torch::kHalf);
  EXPECT_FALSE(half.grad().isnan().any().item<bool>());
}

TEST_F(SimulatedDevice, RandomNumbersDoNotDependOnDelays) {
  const auto draw = [&](uint64_t seed) {
    simulated_cuda::restart(seed);
    torch::manual_seed(5);
    const auto first = torch::randn({50}, device_).cpu();
    const auto dropped =
        torch::dropout(torch::ones({50}, device_), 0.5, true).cpu();
    const c10::StreamGuard guard(side_);
    return torch::cat(
        {first, dropped,
         torch::randperm(50, torch::TensorOptions(device_).dtype(torch::kLong))
             .to(torch::kFloat)
             .cpu()});
  };
  const auto expected = draw(0);
  for (uint64_t seed = 1; seed < 10; ++seed) {
    EXPECT_TRUE(draw(seed).equal(expected)) << seed;
  }
}

TEST_F(SimulatedDevice, GeneratorsHaveState) {
  torch::manual_seed(5);
  auto generator = at::globalContext().defaultGenerator(device_);
  const auto state = generator.get_state();
  EXPECT_EQ(generator.current_seed(), 5U);
  const auto first = torch::randn({50}, device_);
  EXPECT_FALSE(torch::randn({50}, device_).equal(first));
  generator.set_state(state);
  EXPECT_TRUE(torch::randn({50}, device_).equal(first));
  const auto ones = torch::ones({10000}, device_);
  const auto kept = torch::dropout(ones, 0.25, true);
  EXPECT_NEAR(kept.mean().item<float>(), 1, 0.05);
  EXPECT_NEAR((kept > 0).to(torch::kFloat).mean().item<float>(), 0.75, 0.05);
  EXPECT_THROW(ones.clone().normal_(0, 1, at::detail::getDefaultCPUGenerator()),
               c10::Error);
}

TEST_F(SimulatedDevice, ErrorsOfOperationsComeWithTheNextWait) {
  const auto x = torch::ones({3, 2}, device_);
  const auto index =
      torch::full({1}, 7, torch::dtype(torch::kLong).device(device_));
  const auto wrong = torch::embedding(x, index);
  EXPECT_THROW(cuda_.synchronizeStream(main_), c10::Error);
  EXPECT_EQ(x.sum().item<float>(), 6);
  EXPECT_THROW(x.mm(x), c10::Error);  // shapes are known at the call
  EXPECT_THROW(torch::layer_norm(x, {5}), c10::Error);
  EXPECT_EQ(x.sum().item<float>(), 6);
}

TEST_F(SimulatedDevice, BatchNormsOfSeveralDevices) {
  const auto x = torch::randn({6, 3, 4});
  const auto on_device = x.to(device_);
  auto [mean, invstd] = at::batch_norm_stats(on_device, 1e-5);
  const auto both = [](const torch::Tensor& t) { return torch::stack({t, t}); };
  auto running_mean = torch::zeros({3}, device_);
  auto running_var = torch::ones({3}, device_);
  auto [all_mean, all_invstd] = at::batch_norm_gather_stats_with_counts(
      on_device, both(mean), both(invstd), running_mean, running_var, 0.1, 1e-5,
      torch::full({2}, 24.0, device_));
  const auto weight = torch::tensor({1.F, 2.F, 3.F});
  const auto twice = torch::cat({x, x}).requires_grad_();
  torch::nn::BatchNorm1d norm(3);
  norm->weight.set_data(weight);
  const auto expected = norm(twice);
  const auto result = at::batch_norm_elemt(on_device, weight.to(device_),
                                           torch::zeros({3}, device_), all_mean,
                                           all_invstd, 1e-5);
  EXPECT_TRUE(result.cpu().allclose(expected.slice(0, 0, 6), 1e-4, 1e-5));
  EXPECT_TRUE(running_mean.cpu().allclose(norm->running_mean, 1e-4, 1e-5));
  EXPECT_TRUE(running_var.cpu().allclose(norm->running_var, 1e-4, 1e-5));

  const auto grad = torch::randn({6, 3, 4});
  expected.backward(torch::cat({grad, grad}));
  auto [sum_dy, sum_dy_xmu, grad_weight, grad_bias] =
      at::batch_norm_backward_reduce(grad.to(device_), on_device, all_mean,
                                     all_invstd, weight.to(device_), true, true,
                                     true);
  const auto grad_input = at::batch_norm_backward_elemt(
      grad.to(device_), on_device, all_mean, all_invstd, weight.to(device_),
      sum_dy * 2, sum_dy_xmu * 2,
      torch::full({2}, 24, torch::dtype(torch::kInt).device(device_)));
  EXPECT_TRUE(
      grad_input.cpu().allclose(twice.grad().slice(0, 0, 6), 1e-3, 1e-4));
  EXPECT_TRUE(
      (grad_weight * 2).cpu().allclose(norm->weight.grad(), 1e-4, 1e-4));
  EXPECT_TRUE((grad_bias * 2).cpu().allclose(norm->bias.grad(), 1e-4, 1e-4));
}

TEST_F(SimulatedDevice, ForkedProcessesMayNotUseIt) {
  const auto x = torch::ones({2}, device_);
  const pid_t child = fork();
  if (child == 0) {
    try {
      torch::ones({2}, device_);
    } catch (const c10::Error& error) {
      _exit(std::string_view(error.what()).find("forked subprocess") !=
                    std::string_view::npos
                ? 0
                : 2);
    }
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace lockstep::internal
