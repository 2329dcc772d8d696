#include "lockstep/amp/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/amp/clip_grad.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One parameter of ones and its SGD of rate 1: after a step with gradient g it
// holds 1 - g.
struct Model {
  torch::Tensor weight = torch::ones({3}).requires_grad_();
  torch::optim::SGD optimizer{{weight}, 1.0};

  void backward(GradScaler& scaler, double gradient) {
    optimizer.zero_grad();
    scaler.scale((weight * gradient).sum()).backward();
  }
  float value() const { return weight[0].item<float>(); }
};

TEST(GradScaler, ScalesLossesAndUnscalesGradients) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
  Model model;
  auto loss = scaler.scale((model.weight * 0.25).sum());
  EXPECT_EQ(loss.item<float>(), 0.75f * 1024);
  loss.backward();
  EXPECT_EQ(model.weight.grad()[0].item<float>(), 256);
  scaler.unscale_(model.optimizer);
  EXPECT_EQ(model.weight.grad()[0].item<float>(), 0.25f);
  scaler.step(model.optimizer);  // does not unscale again
  EXPECT_EQ(model.value(), 0.75f);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1024);

  auto outputs = scaler.scale({torch::ones({1}), torch::full({2}, 2.0)});
  EXPECT_EQ(outputs[0].item<float>(), 1024);
  EXPECT_EQ(outputs[1][1].item<float>(), 2048);
}

// LibTorch's kernels take float32 whatever the default dtype is.
TEST(GradScaler, WorksWithAnotherDefaultDtype) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
  auto weight = torch::ones({3}, at::kFloat).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1.0);
  scaler.scale(weight.sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_EQ(weight.abs().max().item<float>(), 0);
}

// module->parameters() names a tied tensor twice; Python's names it once.
TEST(GradScaler, AParameterListedTwiceIsUnscaledOnce) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
  auto weight = torch::ones({3}).requires_grad_();
  torch::optim::SGD optimizer({weight, weight}, 1.0);
  scaler.scale((weight * 0.25).sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad()[0].item<float>(), 0.25f);
}

// 2^-26 is 0 in float16, whose smallest number is 2^-24; 2^16 times 2^-26 is
// not.
TEST(GradScaler, KeepsWhatFloat16WouldLose) {
  const double tiny = std::ldexp(1.0, -26);
  auto gradient_with = [&](bool enabled) {
    GradScaler scaler({.device = at::kCPU, .enabled = enabled});
    Model model;
    auto half = model.weight.to(at::kHalf);
    scaler.scale(half.to(at::kFloat).mul(tiny).sum()).backward();
    scaler.unscale_(model.optimizer);
    return model.weight.grad()[0].item<double>();
  };
  EXPECT_EQ(gradient_with(false), 0);
  EXPECT_EQ(gradient_with(true), tiny);
}

TEST(GradScaler, SkipsAStepWithInfinityAndBacksOff) {
  for (float bad : {kInfinity, -kInfinity, NAN}) {
    GradScaler scaler(
        {.device = at::kCPU, .init_scale = 16, .growth_interval = 2});
    Model model;
    auto iterate = [&](float gradient) {
      model.backward(scaler, 0.125);
      model.weight.grad()[1] *= gradient;
      scaler.step(model.optimizer);
      bool found = scaler.found_inf(model.optimizer);
      scaler.update();
      return found;
    };
    EXPECT_FALSE(iterate(1));
    EXPECT_TRUE(iterate(bad));
    EXPECT_EQ(scaler.get_scale(), 8);
    EXPECT_EQ(model.value(), 0.875f) << "an element of a skipped step moved";
    EXPECT_FALSE(iterate(1));  // growth counts from the start
    EXPECT_EQ(scaler.get_scale(), 8);
    EXPECT_FALSE(iterate(1));
    EXPECT_EQ(scaler.get_scale(), 16);
    EXPECT_EQ(model.value(), 0.625f);
  }
}

TEST(GradScaler, OverflowInFloat16SkipsTheStep) {
  GradScaler scaler({.device = at::kCPU});
  Model model;
  auto half = model.weight.to(at::kHalf);
  // 2^16 is above 65504, float16's largest.
  scaler.scale(half.to(at::kFloat).sum()).backward();
  EXPECT_FALSE(model.weight.grad().isfinite().any().item<bool>());
  scaler.step(model.optimizer);
  scaler.update();
  EXPECT_EQ(model.value(), 1);
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, SkipsOneOfSeveralOptimizers) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 4});
  Model good;
  Model bad;
  good.backward(scaler, 0.5);
  bad.backward(scaler, 0.5);
  bad.weight.grad()[2] = kInfinity;
  scaler.unscale_(good.optimizer);
  scaler.step(bad.optimizer);
  scaler.step(good.optimizer);
  EXPECT_FALSE(scaler.found_inf(good.optimizer));
  EXPECT_TRUE(scaler.found_inf(bad.optimizer));
  scaler.update();
  EXPECT_EQ(good.value(), 0.5f);
  EXPECT_EQ(bad.value(), 1);
  EXPECT_EQ(scaler.get_scale(), 2) << "one that found it counts for all";
}

TEST(GradScaler, ClipsBetweenUnscaleAndStep) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 256});
  Model model;
  model.backward(scaler, 2);
  scaler.unscale_(model.optimizer);
  auto norm = clip_grad_norm_(model.optimizer, 1.0);
  EXPECT_FLOAT_EQ(norm.item<float>(), 2 * std::sqrt(3.0f));
  scaler.step(model.optimizer);
  EXPECT_NEAR(model.value(), 1 - 1 / std::sqrt(3.0), 1e-6);
}

TEST(GradScaler, UnscalesSeveralDtypesAndSparseGradients) {
  torch::nn::Embedding embedding(
      torch::nn::EmbeddingOptions(4, 2).sparse(true));
  auto wide = torch::ones({2}, torch::kDouble).requires_grad_();
  auto narrow = torch::ones({2}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD optimizer({embedding->weight, wide, narrow}, 0.1);
  GradScaler scaler({.device = at::kCPU, .init_scale = 8});
  auto loss = embedding(torch::tensor({1, 1, 3})).sum() + wide.sum() +
              narrow.sum().to(torch::kFloat);
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  auto gradient = embedding->weight.grad();
  ASSERT_TRUE(gradient.is_sparse());
  EXPECT_TRUE(torch::equal(
      gradient.to_dense(),
      torch::tensor({{0., 0.}, {2., 2.}, {0., 0.}, {1., 1.}}, torch::kFloat)));
  EXPECT_EQ(wide.grad()[0].item<double>(), 1);
  EXPECT_EQ(narrow.grad()[0].item<float>(), 1);
  EXPECT_FALSE(scaler.found_inf(optimizer));

  scaler.update();
  embedding->weight.grad()._values()[1][0] = NAN;
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.found_inf(optimizer));
}

TEST(GradScaler, TakesANewScale) {
  GradScaler scaler({.device = at::kCPU});
  Model model;
  model.backward(scaler, 1);
  scaler.step(model.optimizer);
  scaler.update(128.0);
  EXPECT_EQ(scaler.get_scale(), 128);
  auto number = torch::full({1}, 64.0);
  scaler.update(number);
  number.fill_(1);
  EXPECT_EQ(scaler.get_scale(), 64);
  model.backward(scaler, 1);
  EXPECT_EQ(model.weight.grad()[0].item<float>(), 64);
  scaler.step(model.optimizer);  // the last update() has ended the step

  EXPECT_THROW(scaler.update(0.0), std::invalid_argument);
  EXPECT_THROW(scaler.update(NAN), std::invalid_argument);
  EXPECT_THROW(scaler.update(torch::ones({2})), std::invalid_argument);
  EXPECT_THROW(scaler.update(torch::ones({}).requires_grad_()),
               std::invalid_argument);
  EXPECT_THROW(scaler.update(torch::Tensor()), std::invalid_argument);
  EXPECT_EQ(scaler.get_scale(), 64);
}

TEST(GradScaler, SettersHoldFromTheNextUpdate) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 2});
  scaler.set_growth_interval(1);
  scaler.set_growth_factor(8);
  scaler.set_backoff_factor(0.125);
  EXPECT_EQ(scaler.get_growth_interval(), 1);
  EXPECT_EQ(scaler.get_growth_factor(), 8);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.125);
  Model model;
  model.backward(scaler, 1);
  scaler.step(model.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 16);
  model.backward(scaler, kInfinity);
  scaler.step(model.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
}

TEST(GradScaler, DisabledIsNotThere) {
  GradScaler scaler({.device = at::kCPU, .enabled = false});
  EXPECT_FALSE(scaler.is_enabled());
  Model model;
  auto loss = model.weight.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(model.optimizer);
  auto returned = scaler.step(model.optimizer, [] { return torch::ones({}); });
  EXPECT_EQ(returned.item<float>(), 1) << "the closure was not handed on";
  EXPECT_EQ(model.value(), 0);
  EXPECT_FALSE(scaler.found_inf(model.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, ForCudaWithoutAGpuIsDisabled) {
  EXPECT_EQ(GradScaler({.device = at::kCUDA}).is_enabled(), at::hasCUDA());
}

// The default was CUDA: in a program for CPUs the scaler did nothing.
TEST(GradScaler, TakesTheDeviceOfTheFirstLoss) {
  GradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.scale(torch::ones({})).item<double>(), 65536);
  EXPECT_NO_THROW(scaler.update(torch::tensor(2.0)));
  EXPECT_EQ(scaler.get_scale(), 2);
}

TEST(GradScaler, RefusesOptionsThatCannotWork) {
  auto refuses = [](const GradScalerOptions& options, const char* name) {
    EXPECT_THAT([&] { GradScaler scaler(options); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(name)));
  };
  refuses({.device = at::kCPU, .growth_factor = 1}, "growth_factor is 1");
  refuses({.device = at::kCPU, .backoff_factor = 1}, "backoff_factor is 1");
  refuses({.device = at::kCPU, .init_scale = 0}, "init_scale is 0");
  refuses({.device = at::kCPU, .init_scale = kInfinity}, "init_scale is inf");
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  Model model;
  Model idle;
  GradScaler scaler({.device = at::kCPU, .init_scale = 4});
  auto refuses = [](auto call, const char* why) {
    EXPECT_THAT(call, ThrowsMessage<std::logic_error>(HasSubstr(why)));
  };
  refuses([&] { scaler.unscale_(model.optimizer); }, "unscale_: no loss");
  refuses([&] { scaler.step(model.optimizer); }, "step: no loss");
  refuses([&] { scaler.update(); }, "update: no loss");
  refuses([&] { scaler.update(2.0); }, "update: no loss");

  model.backward(scaler, 0.5);
  refuses([&] { scaler.update(); }, "no optimizer with gradients");
  refuses([&] { scaler.found_inf(model.optimizer); }, "neither");
  refuses([&] { scaler.step(idle.optimizer); }, "has a gradient");
  refuses([&] { scaler.step(idle.optimizer); }, "has a gradient");
  scaler.unscale_(model.optimizer);
  refuses([&] { scaler.unscale_(model.optimizer); }, "unscale_() was already");
  EXPECT_EQ(model.weight.grad()[0].item<float>(), 0.5f);
  scaler.step(model.optimizer);
  refuses([&] { scaler.unscale_(model.optimizer); }, "step() was already");
  refuses([&] { scaler.step(model.optimizer); }, "step() was already");
  EXPECT_EQ(model.value(), 0.5f);
  idle.backward(scaler, 0.25);
  scaler.step(idle.optimizer);
  EXPECT_EQ(idle.value(), 0.75f);
  scaler.update();
  refuses([&] { scaler.update(); }, "no optimizer with gradients");
  model.backward(scaler, 0.5);
  EXPECT_THAT(
      [&] { scaler.step(model.optimizer, [] { return torch::ones({}); }); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("closure")));
  scaler.step(model.optimizer);
  EXPECT_EQ(model.value(), 0);
}

TEST(GradScaler, RefusesGradientsInFloat16) {
  auto half = torch::ones({2}, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer({half}, 0.1);
  GradScaler scaler({.device = at::kCPU, .init_scale = 4});
  scaler.scale(half.sum()).backward();
  EXPECT_THAT([&] { scaler.step(optimizer); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("float16"), HasSubstr("autocast"))));
  EXPECT_EQ(half.grad()[0].item<float>(), 4);
}

}  // namespace
}  // namespace lockstep::internal
