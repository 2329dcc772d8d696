// DataParallel over two GPUs; skips if there are fewer.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/parallel/data_parallel/data_parallel.h"

namespace lockstep::internal::testing {
namespace {

torch::nn::Sequential net_on(at::Device device) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                            torch::nn::Linear(8, 2));
  net->to(device, torch::kFloat64);
  return net;
}

TEST(DataParallelGpu, TrainsAsOneOverTwoGpus) {
  if (torch::cuda::device_count() < 2) {
    GTEST_SKIP() << "needs two GPUs, and there are "
                 << static_cast<int>(torch::cuda::device_count());
  }
  const at::Device first(at::kCUDA, 0);
  auto module = net_on(first);
  auto single = net_on(first);
  DataParallel<torch::nn::Sequential> model(
      module, {.device_ids = {first, at::Device(at::kCUDA, 1)}});
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  torch::optim::Adam optimizer_single(single->parameters(), 0.01);
  for (int step = 0; step < 10; ++step) {
    auto x = torch::randn({7, 6}, torch::kFloat64).to(first);
    optimizer.zero_grad();
    optimizer_single.zero_grad();
    model(x).square().mean().backward();
    single->forward(x).square().mean().backward();
    optimizer.step();
    optimizer_single.step();
  }
  auto of_single = single->parameters();
  auto of_model = model->parameters();
  for (size_t i = 0; i < of_single.size(); ++i) {
    EXPECT_LE((of_model[i] - of_single[i]).abs().max().item<double>(), 1e-10);
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
