// DataParallel over several devices, and a DataLoader that copies ahead to one,
// with the delays of several seeds.

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/accelerator.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/samplers.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using testing::append_state;
using testing::kDeviceType;
using torch::Tensor;
using torch::nn::Sequential;

Sequential make_net(const at::Device& device) {
  torch::manual_seed(3);
  Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                 torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(device, torch::kDouble);
  return net;
}

// Trains over the devices; batch norms see a part of the batch, as on the CPU.
std::vector<Tensor> train(const std::vector<torch::Device>& devices,
                          bool on_side_streams) {
  const torch::Device first = devices.front();
  Sequential net = make_net(first);
  std::vector<Tensor> results;
  {
    std::optional<c10::MultiStreamGuard> guard;
    std::vector<c10::Stream> before, side;
    if (on_side_streams) {
      const c10::impl::VirtualGuardImpl accelerator(first.type());
      for (const torch::Device& device : devices) {
        before.push_back(accelerator.getStream(device));
        side.push_back(accelerator.getStreamFromGlobalPool(device));
        await_stream(side.back(), before.back());
      }
      guard.emplace(side);
    }
    DataParallel<Sequential> model(net, {.device_ids = devices});
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    torch::manual_seed(5);
    for (int step = 0; step < 5; ++step) {
      const Tensor x =
          torch::randn({11, 6}, torch::kDouble).to(first).requires_grad_();
      optimizer.zero_grad();
      const Tensor out = model(x);
      EXPECT_EQ(out.device(), first);
      out.square().mean().backward();
      optimizer.step();
      results.push_back(x.grad().cpu());
      append_state(*net, results);
    }
    for (Tensor& result : results) result = result.cpu();
  }
  return results;
}

TEST(DataParallelOnDevices, TrainsOverFourDevicesAsOverFourReplicas) {
  const auto expected =
      train(std::vector(4, torch::Device(torch::kCPU)), false);
  std::vector<torch::Device> devices;
  for (const c10::DeviceIndex index : {1, 0, 3, 2}) {
    devices.emplace_back(kDeviceType, index);
  }
  for (uint64_t seed = 0; seed <= 6; ++seed) {
    for (const bool on_side_streams : {false, true}) {
      simulated_cuda::restart(seed);
      const auto results = train(devices, on_side_streams);
      ASSERT_EQ(results.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(results[i].allclose(expected[i], 1e-10, 1e-12))
            << "seed " << seed << ", side streams " << on_side_streams
            << ", result " << i;
      }
    }
  }
}

// A batch is whole whatever stream the loop uses, and its memory is not given
// to the next one while the loop's operations use it.
TEST(DataLoaderOnDevices, BatchesCopiedAheadAreWhole) {
  const int64_t samples = 48, size = 512;
  const Tensor rows = torch::arange(samples).view({samples, 1});
  TensorDataset dataset(rows.expand({samples, size}).contiguous(), rows);
  SequentialSampler sampler(samples);
  const torch::Device device(kDeviceType, 1);
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    for (const int64_t workers : {0, 2}) {
      for (const bool pin : {false, true}) {
        simulated_cuda::restart(seed);
        const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type())
                                         .getStreamFromGlobalPool(device));
        DataLoader loader(dataset, sampler,
                          {.batch_size = 4,
                           .device = device,
                           .num_workers = workers,
                           .pin_memory = pin});
        Tensor wrong = torch::zeros({}, device);
        int64_t next = 0;
        for (auto& batch : loader) {
          EXPECT_EQ(batch.data.device(), device);
          const Tensor wanted =
              torch::arange(next, next + 4,
                            torch::TensorOptions(torch::kLong).device(device))
                  .view({4, 1});
          wrong += batch.data.ne(wanted).sum() + batch.target.ne(wanted).sum();
          next += 4;
        }
        EXPECT_EQ(next, samples);
        EXPECT_EQ(wrong.item<float>(), 0)
            << "seed " << seed << ", " << workers << " workers, pin " << pin;
      }
    }
  }
}

// Worker threads have another current device than the loop.
TEST(DataLoaderOnDevices, ADeviceWithoutANumberIsTheLoops) {
  const Tensor rows = torch::arange(12).view({12, 1});
  TensorDataset dataset(rows, rows);
  SequentialSampler sampler(12);
  const c10::DeviceGuard guard(torch::Device(kDeviceType, 2));
  DataLoader loader(dataset, sampler,
                    {.device = kDeviceType, .num_workers = 1});
  for (auto& batch : loader) {
    EXPECT_EQ(batch.data.device(), torch::Device(kDeviceType, 2));
  }
}

TEST(DataLoaderOnDevices, PinnedBatchesStayOnTheHost) {
  const Tensor rows = torch::arange(12).view({12, 1});
  TensorDataset dataset(rows, rows);
  SequentialSampler sampler(12);
  DataLoader loader(dataset, sampler, {.batch_size = 5, .pin_memory = true});
  int64_t seen = 0;
  for (auto& batch : loader) {
    EXPECT_TRUE(batch.data.is_pinned());
    EXPECT_TRUE(batch.data.is_cpu());
    seen += batch.data.size(0);
  }
  EXPECT_EQ(seen, 12);
}

}  // namespace
}  // namespace lockstep::internal
