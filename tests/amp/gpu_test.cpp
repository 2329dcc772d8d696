// Autocast and GradScaler on a GPU; skips if LibTorch sees none.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"

namespace lockstep::internal {
namespace {

class AmpGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "needs a GPU, and LibTorch sees none";
    }
    torch::manual_seed(0);
  }
};

// A small regression, computed in float16 from float32 parameters.
struct Regression {
  torch::Tensor x = torch::randn({256, 8}, torch::kCUDA);
  torch::Tensor y = x.mm(torch::randn({8, 1}, torch::kCUDA)).tanh();
  torch::nn::Sequential net = on_gpu();
  torch::optim::Adam optimizer{net->parameters(), 1e-2};

  static torch::nn::Sequential on_gpu() {
    torch::nn::Sequential net(torch::nn::Linear(8, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 1));
    net->to(torch::kCUDA);
    return net;
  }
  torch::Tensor backward(GradScaler& scaler) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      Autocast mixed(at::kCUDA);
      auto out = net->forward(x);
      EXPECT_EQ(out.scalar_type(), at::kHalf);
      loss = torch::mse_loss(out, y);
    }
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    scaler.scale(loss).backward();
    return loss.detach();
  }
  // Returns whether the step was skipped.
  bool step(GradScaler& scaler) {
    scaler.step(optimizer);
    const bool skipped = scaler.found_inf(optimizer);
    scaler.update();
    return skipped;
  }
  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> copies;
    for (const auto& parameter : net->parameters()) {
      copies.push_back(parameter.detach().clone());
    }
    return copies;
  }
};

bool all_equal(const std::vector<torch::Tensor>& a,
               const std::vector<torch::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return a.size() == b.size();
}

TEST_F(AmpGpu, TrainsInFloat16WithAScaler) {
  GradScaler scaler;
  ASSERT_TRUE(scaler.is_enabled());
  Regression task;
  const auto first = task.backward(scaler).item<double>();
  double last = first;
  for (int step = 0; step < 300; ++step) {
    last = task.backward(scaler).item<double>();
    task.step(scaler);
  }
  EXPECT_LT(last, first / 20);
  for (const auto& parameter : task.net->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
  }
}

TEST_F(AmpGpu, SkipsAStepWithInfinityOrNanAndHalvesTheScale) {
  for (float bad : {std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    GradScaler scaler({.init_scale = 256});
    Regression task;
    task.backward(scaler);
    EXPECT_FALSE(task.step(scaler));
    EXPECT_EQ(scaler.get_scale(), 256);

    const auto before = task.values();
    task.backward(scaler);
    task.net->parameters()[2].grad()[0][5] = bad;
    EXPECT_TRUE(task.step(scaler)) << bad;
    EXPECT_EQ(scaler.get_scale(), 128);
    EXPECT_TRUE(all_equal(task.values(), before)) << "moved in a skipped step";

    task.backward(scaler);
    EXPECT_FALSE(task.step(scaler));
    EXPECT_FALSE(all_equal(task.values(), before));
  }
}

TEST_F(AmpGpu, TheScaleGrowsAfterItsInterval) {
  GradScaler scaler({.init_scale = 64, .growth_interval = 3});
  Regression task;
  std::vector<double> scales;
  for (int step = 0; step < 8; ++step) {
    task.backward(scaler);
    if (step == 4) {  // an overflow, so the growth count starts again
      task.net->parameters()[0].grad().fill_(
          std::numeric_limits<float>::infinity());
    }
    task.step(scaler);
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{64, 64, 128, 128, 64, 64, 64, 128}));
}

// The gradients of the last layer's output are far above float16's 65,504.
TEST_F(AmpGpu, OverflowInFloat16BacksOffUntilTheScaleFits) {
  constexpr double kTooLarge = 1099511627776.0;  // 2^40
  GradScaler scaler({.init_scale = kTooLarge});
  Regression task;
  const auto before = task.values();
  int skipped = 0;
  for (;;) {
    task.backward(scaler);
    if (!task.step(scaler)) break;
    ASSERT_TRUE(all_equal(task.values(), before));
    ASSERT_LT(++skipped, 40);
  }
  EXPECT_GE(skipped, 10);
  EXPECT_EQ(scaler.get_scale(), std::ldexp(kTooLarge, -skipped));
  EXPECT_FALSE(all_equal(task.values(), before));
}

TEST_F(AmpGpu, LinearsAreLoweredAndLossesFloat32) {
  torch::nn::Linear linear(8, 4);
  linear->to(torch::kCUDA);
  auto x = torch::randn({16, 8}, torch::kCUDA);
  auto y = torch::randn({16, 4}, torch::kCUDA);
  auto labels =
      torch::arange(16, torch::dtype(at::kLong).device(at::kCUDA)) % 4;
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(c10::toString(dtype));
    linear->zero_grad();
    torch::Tensor out, loss;
    {
      Autocast mixed(at::kCUDA, dtype);
      out = linear(x);
      loss = torch::mse_loss(out, y);
      EXPECT_EQ(torch::nn::functional::cross_entropy(out, labels).scalar_type(),
                at::kFloat);
      EXPECT_EQ(out.softmax(1).scalar_type(), at::kFloat);
    }
    EXPECT_EQ(out.scalar_type(), dtype);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    loss.backward();
    EXPECT_EQ(linear->weight.grad().scalar_type(), at::kFloat);
    auto plain = linear(x);
    EXPECT_EQ(plain.scalar_type(), at::kFloat);
    // bfloat16 has 8 bits.
    EXPECT_TRUE(torch::allclose(out.to(at::kFloat), plain, 2e-2, 2e-2));
  }
}

}  // namespace
}  // namespace lockstep::internal
