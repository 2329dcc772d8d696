// The parts of lockstep/parallel that run on one GPU, in a world of one rank.
// Skips if LibTorch sees no GPU; tests that need NCCL skip if it is missing.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using nn::SyncBatchNorm2d;
using testing::World;
using torch::nn::Linear;
using torch::nn::Sequential;

std::string no_gpu() {
  return torch::cuda::is_available() ? ""
                                     : "needs a GPU, and LibTorch sees none";
}

// Returns why NCCL cannot be used here; empty if it can.
std::string no_nccl() {
  if (auto reason = no_gpu(); !reason.empty()) return reason;
  const auto& all = registered_backends();
  const auto found = std::ranges::find(all, "nccl", &BackendEntry::name);
  if (found == all.end()) throw std::logic_error("nccl is not registered");
  return found->missing ? found->missing() : "";
}

Sequential net_on_gpu() {
  torch::manual_seed(5);
  Sequential net(Linear(8, 64), torch::nn::Tanh(), Linear(64, 64),
                 torch::nn::Tanh(), Linear(64, 3));
  net->to(torch::kCUDA);
  return net;
}

// Trains the plain module and the wrapped one, which take the same path as long
// as each has its own gradients.
template <typename Check>
void compare_with_plain(DistributedDataParallel<Sequential>& model,
                        const Check& check) {
  auto plain = net_on_gpu();
  torch::optim::SGD optimizer(plain->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {  // the second rebuilds the buckets
    SCOPED_TRACE(step);
    auto x = torch::randn({16, 8}, torch::kCUDA);
    auto wanted = plain->parameters();
    auto given = model->parameters();
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < wanted.size(); ++i) given[i].copy_(wanted[i]);
    }
    optimizer.zero_grad();
    model->zero_grad();
    plain->forward(x).square().mean().backward();
    model(x).square().mean().backward();
    for (size_t i = 0; i < wanted.size(); ++i) {
      SCOPED_TRACE(i);
      ASSERT_TRUE(given[i].grad().is_cuda());
      check(given[i].grad(), wanted[i].grad());
    }
    optimizer.step();
  }
}

WORLD_TEST(DdpGpu, GradientsOverNcclAreThePlainModules, 1) {
  if (auto reason = no_nccl(); !reason.empty()) GTEST_SKIP() << reason;
  auto group = init_process_group("nccl");
  for (bool views : {true, false}) {
    SCOPED_TRACE(views);
    DistributedDataParallel<Sequential> model(
        net_on_gpu(),
        {.bucket_cap_mb = 0.01, .gradient_as_bucket_view = views});
    compare_with_plain(model, [](const auto& grad, const auto& wanted) {
      EXPECT_EQ(grad.scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::allclose(grad, wanted, 1e-5, 1e-7));
    });
    EXPECT_GT(model.get_ddp_logging_data().num_buckets, 1);
  }
}

WORLD_TEST(DdpGpu, TheFp16HookGivesThemInHalfPrecision, 1) {
  if (auto reason = no_nccl(); !reason.empty()) GTEST_SKIP() << reason;
  auto group = init_process_group("nccl");
  DistributedDataParallel<Sequential> model(net_on_gpu());
  model.register_comm_hook(fp16_compress_hook());
  compare_with_plain(model, [](const auto& grad, const auto& wanted) {
    EXPECT_EQ(grad.scalar_type(), torch::kFloat);
    // float16 has 11 bits, and steps of 6e-8 below 6e-5.
    EXPECT_TRUE(torch::allclose(grad, wanted, 1e-3, 1e-7));
    EXPECT_TRUE(grad.equal(grad.to(torch::kHalf).to(torch::kFloat)))
        << "was not sent as float16";
  });
}

void expect_close(const torch::Tensor& given, const torch::Tensor& wanted,
                  const char* what) {
  const double bound = wanted.scalar_type() == torch::kHalf ? 2e-3 : 1e-5;
  ASSERT_EQ(given.scalar_type(), wanted.scalar_type()) << what;
  EXPECT_TRUE(given.is_cuda()) << what;
  EXPECT_TRUE(torch::allclose(given, wanted, bound, bound)) << what;
}

// One rank communicates nothing, so any group is allowed.
WORLD_TEST(SyncBatchNormGpu, OfOneRankIsBatchNorm, 1) {
  if (auto reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  auto group = init_process_group();
  for (auto dtype : {torch::kFloat, torch::kHalf}) {
    SCOPED_TRACE(c10::toString(dtype));
    torch::manual_seed(9);
    SyncBatchNorm2d sync(6);
    torch::nn::BatchNorm2d plain(6);
    sync->to(torch::kCUDA);
    plain->to(torch::kCUDA);
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      if (step == 3) {
        sync->eval();
        plain->eval();
      }
      auto x = (torch::randn({5, 6, 4, 3}, torch::kCUDA) * 3 + 1).to(dtype);
      auto weights = torch::randn_like(x);
      auto x_sync = x.clone().requires_grad_();
      auto x_plain = x.clone().requires_grad_();
      auto out_sync = sync(x_sync);
      auto out_plain = plain(x_plain);
      sync->zero_grad();
      plain->zero_grad();
      (out_sync * weights).sum().backward();
      (out_plain * weights).sum().backward();
      expect_close(out_sync, out_plain, "output");
      expect_close(x_sync.grad(), x_plain.grad(), "gradient of the input");
      expect_close(sync->weight.grad(), plain->weight.grad(), "of the weight");
      expect_close(sync->bias.grad(), plain->bias.grad(), "of the bias");
      expect_close(sync->running_mean, plain->running_mean, "running_mean");
      expect_close(sync->running_var, plain->running_var, "running_var");
      EXPECT_TRUE(sync->num_batches_tracked.equal(plain->num_batches_tracked));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
