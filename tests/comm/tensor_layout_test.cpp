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

TEST(TensorLayout, AnElementRangeMayHaveAnyShape) {
  auto piece = torch::rand({4});
  set_layout(piece,
             {.shape = {4, 3}, .box = {{2, 0}, {2, 3}}, .range = Range{1, 5}});
  EXPECT_EQ(layout_of(piece)->range, (Range{1, 5}));
  auto flat = torch::rand({1, 4});
  set_layout(flat, *layout_of(piece));
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
  EXPECT_TRUE(part_of(whole, layout).equal(torch::tensor({{5, 7}})));
  layout.range = Range{2, 4};  // a whole row
  EXPECT_TRUE(part_of(whole, layout).equal(torch::tensor({{7, 8}})));
}

// Programs group parameters by dim(), so a part must have as many as the whole.
TEST(TensorLayout, APartHasAsManyDimensionsAsTheWhole) {
  const auto shape = [](const Sizes& whole, Range range) {
    return sizes_of_part(
        {.shape = whole, .box = whole_box(whole), .range = range});
  };
  EXPECT_EQ(shape({4, 3}, {0, 12}), (Sizes{4, 3}));
  EXPECT_EQ(shape({4, 3}, {3, 9}), (Sizes{2, 3}));
  EXPECT_EQ(shape({4, 3}, {3, 8}), (Sizes{1, 5}));
  EXPECT_EQ(shape({4, 3}, {2, 3}), (Sizes{1, 1}));
  EXPECT_EQ(shape({4, 3}, {12, 12}), (Sizes{0, 3}));
  EXPECT_EQ(shape({2, 3, 4}, {12, 24}), (Sizes{1, 3, 4}));
  EXPECT_EQ(shape({2, 3, 4}, {5, 7}), (Sizes{1, 1, 2}));
  EXPECT_EQ(shape({7}, {2, 4}), (Sizes{2}));
  EXPECT_EQ(shape({0, 3}, {0, 0}), (Sizes{0, 3}));
  EXPECT_EQ(shape({3, 0}, {0, 0}), (Sizes{1, 0}));
  EXPECT_EQ(shape({}, {0, 1}), (Sizes{1}));
  EXPECT_EQ(shape({}, {0, 0}), (Sizes{0}));
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
