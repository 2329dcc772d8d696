#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <thread>

#include "examples/digits_dataset.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::ScalarType dtype_of_product() {
  return torch::ones({2, 2}).mm(torch::ones({2, 2})).scalar_type();
}

TEST(Autocast, RunsProductsInBfloat16OnTheCpuUnlessToldOtherwise) {
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  {
    Autocast mixed(at::kCPU);
    EXPECT_EQ(dtype_of_product(), at::kBFloat16);
  }
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  {
    Autocast mixed(at::kCPU, at::kHalf);
    EXPECT_EQ(dtype_of_product(), at::kHalf);
  }
  EXPECT_EQ(dtype_of_product(), at::kFloat);
}

// Tells oneDNN, which LibTorch asks, to use AVX2 at most. oneDNN reads this
// variable once, so the guards run in a process of their own.
TEST(AutocastDeathTest, OnACpuWithoutFastKernelsItWarnsOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto guards = [](const char* isa, bool enabled) {
    ::setenv("ONEDNN_MAX_CPU_ISA", isa, 1);
    for (int i = 0; i < 3; ++i) {
      Autocast mixed(at::kCPU, at::kBFloat16, enabled);
    }
    for (int i = 0; i < 3; ++i) {
      Autocast mixed(at::kCPU, at::kHalf, enabled);
    }
    std::cerr << "guards ended\n";
    std::exit(0);
  };
  const auto times = [](const std::string& words, int expected) {
    return ::testing::ResultOf(
        "times \"" + words + "\" is printed",
        [words](const std::string& text) {
          int found = 0;
          for (size_t at = text.find(words); at != std::string::npos;
               at = text.find(words, at + 1)) {
            ++found;
          }
          return found;
        },
        expected);
  };
  EXPECT_EXIT(guards("AVX2", true), ::testing::ExitedWithCode(0),
              AllOf(times("Autocast: this CPU has no fast bfloat16", 1),
                    times("Autocast: this CPU has no fast float16", 1),
                    HasSubstr("guards ended")));
  EXPECT_EXIT(guards("AVX2", false), ::testing::ExitedWithCode(0),
              AllOf(times("no fast", 0), HasSubstr("guards ended")));
}

TEST(Autocast, DefaultDtypesArePythons) {
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
  Autocast mixed(at::kCUDA);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
  EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCUDA), at::hasCUDA());
}

TEST(Autocast, NestsAndComesBackToWhatWasAround) {
  Autocast outer(at::kCPU, at::kHalf);
  {
    Autocast off(at::kCPU, {}, /*enabled=*/false);
    EXPECT_EQ(dtype_of_product(), at::kFloat);
    {
      Autocast on(at::kCPU, at::kBFloat16);
      EXPECT_EQ(dtype_of_product(), at::kBFloat16);
    }
    EXPECT_EQ(dtype_of_product(), at::kFloat);
  }
  EXPECT_EQ(dtype_of_product(), at::kHalf);
  {
    // Uses the dtype of the guard around it, not the first default.
    Autocast same(at::kCPU);
    EXPECT_EQ(dtype_of_product(), at::kHalf);
  }
}

TEST(Autocast, EndsByAnException) {
  try {
    Autocast mixed(at::kCPU, at::kHalf, true, /*cache_enabled=*/false);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    throw std::runtime_error("in the region");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  // The nesting is balanced: one more guard is the outermost again.
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
}

// A cached cast is one tensor. A change of the parameter that autograd does not
// see takes effect only after the cast is dropped.
TEST(Autocast, CastsAParameterOnceUntilTheOutermostEnds) {
  auto weight = torch::ones({2, 2}).requires_grad_();
  auto product = [&] {
    return torch::ones({2, 2}).mm(weight)[0][0].item<float>();
  };
  {
    Autocast outer(at::kCPU);
    EXPECT_EQ(product(), 2);
    weight.data().fill_(2);
    {
      Autocast inner(at::kCPU);
      EXPECT_EQ(product(), 2) << "an inner guard has dropped the cast";
      Autocast without(at::kCPU, {}, true, /*cache_enabled=*/false);
      EXPECT_EQ(product(), 4);
    }
    EXPECT_EQ(product(), 2);
  }
  Autocast next(at::kCPU);
  EXPECT_EQ(product(), 4);
}

TEST(Autocast, IsTheThreadsOwn) {
  Autocast mixed(at::kCPU);
  at::ScalarType elsewhere{};
  std::thread([&] { elsewhere = dtype_of_product(); }).join();
  EXPECT_EQ(elsewhere, at::kFloat);
  EXPECT_EQ(dtype_of_product(), at::kBFloat16);
}

TEST(Autocast, RefusesDtypesAndDevicesItCannot) {
  EXPECT_THAT([] { Autocast mixed(at::kCPU, at::kDouble); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("Double"), HasSubstr("cpu"),
                        HasSubstr("BFloat16 Half"), HasSubstr("enabled"))));
  EXPECT_THROW((void)Autocast(at::kCPU, at::kFloat), std::invalid_argument);
  EXPECT_THROW((void)Autocast(at::kCUDA, at::kInt), std::invalid_argument);
  EXPECT_THAT([] { Autocast mixed(at::kMeta); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("meta")));
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
  Autocast off(at::kCPU, at::kDouble, /*enabled=*/false);
  EXPECT_EQ(dtype_of_product(), at::kFloat);
}

TEST(Autocast, BackwardOutsideIsInTheDtypesOfTheForward) {
  auto weight = torch::full({4, 4}, 1.0 / 3).requires_grad_();
  auto x = torch::full({2, 4}, 1.0 / 7);
  torch::Tensor product;
  {
    Autocast mixed(at::kCPU);
    product = x.mm(weight);
  }
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  product.sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  // x^T times ones, computed in bfloat16: 2/7 as bfloat16 has it.
  auto expected = x.to(at::kBFloat16)
                      .t()
                      .mm(torch::ones({2, 4}, torch::dtype(at::kBFloat16)));
  EXPECT_TRUE(torch::equal(weight.grad(), expected.to(at::kFloat)));
  EXPECT_NE(weight.grad()[0][0].item<float>(), 2 * x[0][0].item<float>());
}

TEST(Autocast, TrainsTheDigitsInBfloat16) {
  auto digits =
      examples::read_digits(LOCKSTEP_SOURCE_DIR "/datasets/digits/digits.csv");
  torch::set_num_threads(1);  // small products: a second thread only waits
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(64, 64),
                            torch::nn::ReLU(), torch::nn::Linear(64, 10));
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  auto data = digits.train.data();
  auto target = digits.train.target();
  for (int epoch = 0; epoch < 12; ++epoch) {
    auto order = torch::randperm(data.size(0));
    for (const auto& rows : order.split(64)) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        Autocast mixed(at::kCPU);
        auto scores = net->forward(data.index_select(0, rows));
        ASSERT_EQ(scores.scalar_type(), at::kBFloat16);
        loss =
            torch::nn::functional::cross_entropy(scores, target.index({rows}));
      }
      loss.backward();
      optimizer.step();
    }
  }
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  }
  const torch::NoGradGuard no_grad;
  Autocast mixed(at::kCPU);
  auto found = net->forward(digits.test.data()).argmax(1);
  double right =
      (found == digits.test.target()).to(at::kDouble).mean().item<double>();
  EXPECT_GE(right, 0.95);
}

}  // namespace
}  // namespace lockstep::internal
