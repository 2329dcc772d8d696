#include "lockstep/amp/clip_grad.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <vector>

#include "lockstep/comm/init.h"
#include "tests/amp/sharded_sgd.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using testing::ShardedSgd;
using ::testing::ThrowsMessage;
using testing::with_gradients;

constexpr double kDoubleInfinity = std::numeric_limits<double>::infinity();

std::vector<torch::Tensor> some_gradients(torch::ScalarType dtype) {
  torch::manual_seed(5);
  return {torch::randn({7, 5}).to(dtype), torch::randn({11}).to(dtype) * 3,
          torch::randn({1}).to(dtype)};
}

torch::Tensor flat_gradients(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : parameters) {
    flat.push_back(parameter.grad().flatten());
  }
  return torch::cat(flat);
}

TEST(ClipGrad, ScalesAllGradientsToTheNorm) {
  auto parameters =
      with_gradients({torch::tensor({3.0}), torch::tensor({0.0, 4.0})});
  parameters.push_back(torch::ones({2}).requires_grad_());  // no gradient
  auto norm = clip_grad_norm_(parameters, 1.0);
  EXPECT_EQ(norm.item<float>(), 5);
  EXPECT_NEAR(parameters[0].grad()[0].item<double>(), 0.6, 1e-6);
  EXPECT_NEAR(parameters[1].grad()[1].item<double>(), 0.8, 1e-6);
  EXPECT_FALSE(parameters[2].grad().defined());
  // Below the bound nothing changes, not by a bit.
  auto before = flat_gradients({parameters[0], parameters[1]});
  clip_grad_norm_(parameters, 1.5);
  EXPECT_TRUE(
      torch::equal(flat_gradients({parameters[0], parameters[1]}), before));
}

TEST(ClipGrad, TakesAnOptimizersGroupsAll) {
  auto parameters =
      with_gradients({torch::tensor({3.0}), torch::tensor({0.0, 4.0})});
  torch::optim::SGD optimizer(
      std::vector<torch::optim::OptimizerParamGroup>{{{parameters[0]}},
                                                     {{parameters[1]}}},
      torch::optim::SGDOptions(0.1));
  EXPECT_EQ(get_total_norm(optimizer).item<float>(), 5);
  EXPECT_EQ(clip_grad_norm_(optimizer, 2.5).item<float>(), 5);
  EXPECT_NEAR(parameters[0].grad()[0].item<double>(), 1.5, 1e-6);
  clip_grad_value_(optimizer, 1.75);
  EXPECT_NEAR(parameters[0].grad()[0].item<double>(), 1.5, 1e-6);
  EXPECT_EQ(parameters[1].grad()[1].item<double>(), 1.75);
}

// module->parameters() names a tied tensor twice; Python's names it once.
TEST(ClipGrad, AParameterListedTwiceCountsOnce) {
  const auto tied = [] {
    auto parameters =
        with_gradients({torch::tensor({3.0}), torch::tensor({0.0, 4.0})});
    parameters.push_back(parameters[0]);
    return parameters;
  };
  const auto expect_clipped = [](const std::vector<torch::Tensor>& all) {
    EXPECT_NEAR(all[0].grad()[0].item<double>(), 1.5, 1e-6);
    EXPECT_NEAR(all[1].grad()[1].item<double>(), 2, 1e-6);
  };
  auto parameters = tied();
  std::vector<torch::Tensor> gradients;
  for (const auto& each : parameters) gradients.push_back(each.grad());
  EXPECT_EQ(get_total_norm(gradients).item<float>(), 5);
  EXPECT_EQ(clip_grad_norm_(parameters, 2.5).item<float>(), 5);
  expect_clipped(parameters);

  parameters = tied();
  clip_grads_with_norm_(parameters, 2.5, torch::tensor(5.0));
  expect_clipped(parameters);

  parameters = tied();
  torch::optim::SGD optimizer(parameters, 0.1);
  EXPECT_EQ(get_total_norm(optimizer).item<float>(), 5);
  EXPECT_EQ(clip_grad_norm_(optimizer, 2.5).item<float>(), 5);
  expect_clipped(parameters);

  parameters = tied();
  torch::optim::SGD other(
      std::vector<torch::optim::OptimizerParamGroup>{
          {{parameters[0], parameters[1]}}, {{parameters[2]}}},
      torch::optim::SGDOptions(0.1));
  clip_grads_with_norm_(other, 2.5, torch::tensor(5.0));
  expect_clipped(parameters);
}

TEST(ClipGrad, BoundsValuesOnBothSides) {
  auto parameters =
      with_gradients({torch::tensor(std::vector<float>{
                          -3, 0.5, 2, std::numeric_limits<float>::quiet_NaN()}),
                      torch::tensor({9.0}, torch::kDouble)});
  clip_grad_value_(parameters, 1.0);
  auto gradient = parameters[0].grad();
  EXPECT_TRUE(torch::equal(gradient.slice(0, 0, 3),
                           torch::tensor({-1.0, 0.5, 1.0}, torch::kFloat)));
  EXPECT_TRUE(gradient[3].isnan().item<bool>());
  EXPECT_EQ(parameters[1].grad().item<double>(), 1);
}

TEST(ClipGrad, SparseGradientsCountByTheirSums) {
  auto sparse = [] {
    return torch::sparse_coo_tensor(torch::tensor({{1, 1, 2}}),
                                    torch::tensor({1.0, 2.0, -4.0}), {5});
  };
  auto parameters = with_gradients({sparse()});
  EXPECT_FALSE(parameters[0].grad().is_coalesced());
  EXPECT_EQ(clip_grad_norm_(parameters, 2.5).item<float>(), 5);
  auto dense = parameters[0].grad().to_dense();
  EXPECT_NEAR(dense[1].item<double>(), 1.5, 1e-6);
  EXPECT_NEAR(dense[2].item<double>(), -2, 1e-6);

  parameters = with_gradients({sparse()});
  clip_grad_value_(parameters, 2.0);
  EXPECT_TRUE(torch::equal(parameters[0].grad().to_dense(),
                           torch::tensor({0., 2., -2., 0., 0.})));
  EXPECT_THAT([&] { clip_grad_norm_(parameters, 1, -1); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("sparse")));
}

TEST(ClipGrad, NonFiniteNormsThrowWhereTheyAreToAndChangeNothing) {
  auto parameters = with_gradients({torch::tensor({1.0, kDoubleInfinity})});
  EXPECT_THAT([&] { clip_grad_norm_(parameters, 1.0, 2.0, true); },
              ThrowsMessage<std::runtime_error>(HasSubstr("inf")));
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 1);
  clip_grad_norm_(parameters, 1.0);
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 0);
}

TEST(ClipGrad, NoGradientsHaveNorm0) {
  EXPECT_EQ(clip_grad_norm_({torch::ones({2})}, 1.0).item<float>(), 0);
  EXPECT_EQ(get_total_norm(std::vector<torch::Tensor>{}).item<float>(), 0);
  clip_grad_value_({torch::ones({2})}, 1.0);
}

TEST(ClipGrad, TakesOneTensorAsPythonDoes) {
  const auto parameter = with_gradients({torch::tensor({3.0, 4.0})}).front();
  EXPECT_EQ(get_total_norm(parameter.grad()).item<float>(), 5);
  EXPECT_EQ(clip_grad_norm_(parameter, 2.5).item<float>(), 5);
  EXPECT_NEAR(parameter.grad()[1].item<double>(), 2, 1e-6);
}

TEST(ClipGrad, RefusesBoundsThatAreNone) {
  auto parameters = with_gradients({torch::ones({2})});
  EXPECT_THAT(
      [&] { clip_grad_norm_(parameters, -1); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("max_norm is -1")));
  EXPECT_THROW(clip_grad_norm_(parameters, NAN), std::invalid_argument);
  EXPECT_THROW(clip_grad_norm_(parameters, 1, NAN), std::invalid_argument);
  EXPECT_THROW(clip_grad_value_(parameters, -1), std::invalid_argument);
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 1);
}

// The same gradients, whole on each rank and in parts over them.
void expect_like_whole(const ProcessGroupPtr& group, torch::ScalarType dtype,
                       double norm_type, double max_norm) {
  auto whole = with_gradients(some_gradients(dtype));
  auto parts = with_gradients(some_gradients(dtype));
  ShardedSgd optimizer(parts, 0.1, group);
  auto expected = clip_grad_norm_(whole, max_norm, norm_type);
  auto norm = clip_grad_norm_(optimizer, max_norm, norm_type);
  double bound = dtype == torch::kDouble     ? 1e-14
                 : dtype == torch::kBFloat16 ? 1e-2
                                             : 1e-6;
  EXPECT_NEAR(norm.item<double>() / expected.item<double>(), 1, bound)
      << norm_type;
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(torch::allclose(optimizer.part(parts[i].grad()),
                                optimizer.part(whole[i].grad()), bound, 0))
        << norm_type;
  }
}

WORLD_TEST(ClipGradShards, NormIsThatOfTheWhole, 1, 2, 3) {
  auto group = init_process_group("gloo");
  for (auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (double norm_type :
         {1.0, 2.0, 3.5, -2.0, kDoubleInfinity, -kDoubleInfinity}) {
      expect_like_whole(group.get(), dtype, norm_type, 1e-3);
      expect_like_whole(group.get(), dtype, norm_type, 1e3);
    }
  }
}

WORLD_TEST(ClipGradShards, ValuesAreClippedInTheOwnPartOnly, 2) {
  auto group = init_process_group("gloo");
  auto parameters = with_gradients({torch::full({6}, 5.0)});
  ShardedSgd optimizer(parameters, 0.1, group.get());
  clip_grad_value_(optimizer, 2.0);
  auto gradient = parameters[0].grad();
  EXPECT_EQ(gradient.eq(2).sum().item<int64_t>(), 3);
  EXPECT_EQ(optimizer.part(gradient).eq(2).sum().item<int64_t>(), 3);
}

WORLD_TEST(ClipGradShards, OneRanksNanIsEveryRanks, 2, 3) {
  auto group = init_process_group("gloo");
  for (double norm_type : {1.0, 2.0, kDoubleInfinity, -kDoubleInfinity}) {
    auto parameters = with_gradients({torch::ones({6})});
    ShardedSgd optimizer(parameters, 0.1, group.get());
    if (world.rank == 0) optimizer.part(parameters[0].grad())[0] = NAN;
    EXPECT_THROW(clip_grad_norm_(optimizer, 1.0, norm_type, true),
                 std::runtime_error);
    EXPECT_TRUE(
        std::isnan(clip_grad_norm_(optimizer, 1.0, norm_type).item<double>()));
  }
}

WORLD_TEST(ClipGradShards, ARankWithoutAPartAgrees, 3) {
  auto group = init_process_group("gloo");
  for (double norm_type : {2.0, -1.0, kDoubleInfinity, -kDoubleInfinity}) {
    auto parameters = with_gradients({torch::full({1}, -4.0)});
    ShardedSgd optimizer(parameters, 0.1, group.get());
    EXPECT_EQ(get_total_norm(optimizer, norm_type).item<double>(), 4);
  }
}

WORLD_TEST(ClipGradShards, Order0IsRefused, 2) {
  auto group = init_process_group("gloo");
  ShardedSgd optimizer(with_gradients({torch::ones({4})}), 0.1, group.get());
  EXPECT_THAT([&] { get_total_norm(optimizer, 0); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("sharded")));
}

}  // namespace
}  // namespace lockstep::internal
