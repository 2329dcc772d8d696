#include "lockstep/comm/tensor_layout.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>

#include "tests/harness/message_of.h"

namespace lockstep::internal {
namespace {

using testing::message_of;

TEST(TensorLayout, BelongsToTheTensorAlone) {
  auto weight = torch::rand({2, 3});
  EXPECT_EQ(layout_of(weight), nullptr);
  set_layout(weight, {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}});
  const auto* layout = layout_of(weight);
  ASSERT_NE(layout, nullptr);
  EXPECT_EQ(layout->shape, (Sizes{4, 3}));
  EXPECT_EQ(layout->box, (Box{{2, 0}, {2, 3}}));
  EXPECT_FALSE(layout->range);
  EXPECT_EQ(layout_of(weight[0]), nullptr);
  EXPECT_EQ(layout_of(weight.detach()), nullptr);
  EXPECT_EQ(layout_of(weight.clone()), nullptr);
}

TEST(TensorLayout, StaysWithAParameterThatIsConverted) {
  torch::nn::Linear linear(3, 2);
  set_layout(linear->weight, {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}});
  linear->to(torch::kFloat64);
  ASSERT_NE(layout_of(linear->weight), nullptr);
  EXPECT_EQ(layout_of(linear->bias), nullptr);
}

TEST(TensorLayout, ANewTensorAtTheAddressOfAnOldOneHasNone) {
  for (int i = 0; i < 1000; ++i) {
    auto tensor = torch::empty({1});
    ASSERT_EQ(layout_of(tensor), nullptr);
    set_layout(tensor, {.shape = {2}, .box = {{1}, {1}}});
  }
}

TEST(TensorLayout, AnElementRangeHasOneDimension) {
  auto piece = torch::rand({4});
  set_layout(piece,
             {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}, .range = Range{1, 5}});
  EXPECT_EQ(layout_of(piece)->range, (Range{1, 5}));
  auto empty = torch::empty({0});
  set_layout(empty,
             {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}, .range = Range{6, 6}});
  EXPECT_EQ(layout_of(empty)->range, (Range{6, 6}));
}

TEST(TensorLayout, APartHasTheElementsOfItsBoxAndRange) {
  const auto whole = torch::arange(12).view({4, 3});
  TensorLayout layout{.shape = {4, 3}, .box = {{1, 1}, {2, 2}}};
  EXPECT_TRUE(part_of(whole, layout).equal(torch::tensor({{4, 5}, {7, 8}})));
  layout.range = Range{1, 3};
  EXPECT_TRUE(part_of(whole, layout).equal(torch::tensor({5, 7})));
}

TEST(TensorLayout, WhatDoesNotFitIsRefused) {
  const auto refusal = [](at::IntArrayRef shape, TensorLayout layout) {
    return message_of(
        [&] { set_layout(torch::rand(shape), std::move(layout)); });
  };
  EXPECT_EQ(refusal({3, 3}, {.shape = {4, 3}, .box = {{2, 0}, {3, 3}}}),
            "a layout has the part [2:5, 0:3] of a tensor of shape [4, 3], "
            "which does not contain it");
  EXPECT_EQ(refusal({3, 3}, {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}}),
            "a layout is for a tensor of shape [2, 3], but the tensor has the "
            "shape [3, 3]");
  EXPECT_EQ(
      refusal({4},
              {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}, .range = Range{3, 7}}),
      "a layout has the elements 3 to 7 of a part with 6");
}

}  // namespace
}  // namespace lockstep::internal
