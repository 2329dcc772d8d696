#include "lockstep/checkpoint/sharded/tensor_shard.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {
namespace {

at::Tensor numbered(const Sizes& shape) {
  return torch::arange(numel_of(shape), torch::kLong).view(shape);
}

at::Tensor part_of(const at::Tensor& tensor, const Box& box) {
  return narrow_to(tensor, whole_box(tensor.sizes().vec()), box);
}

TEST(Box, ChunksAreThoseOfTorch) {
  for (const int64_t size : {1, 2, 5, 6, 7, 12}) {
    for (const int64_t count : {1, 2, 3, 4, 8}) {
      const at::Tensor tensor = numbered({3, size});
      const auto chunks = tensor.chunk(count, 1);
      for (int64_t index = 0; index < count; ++index) {
        const Box box = chunk_box({3, size}, 1, index, count);
        if (index < static_cast<int64_t>(chunks.size())) {
          EXPECT_TRUE(
              part_of(tensor, box).equal(chunks[static_cast<size_t>(index)]));
        } else {
          EXPECT_EQ(box.numel(), 0);
        }
      }
    }
  }
}

TEST(TensorShard, AFlatPartOfAPermutedTensorIsItsElements) {
  const at::Tensor logical = numbered({2, 3, 4, 5});
  const at::Tensor stored = logical.contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor memory =
      stored.as_strided({stored.numel()}, {1}, stored.storage_offset());
  for (const Range range : {Range{0, 120}, {1, 119}, {17, 18}, {29, 92}}) {
    const TensorShard shard{"w",
                            {2, 3, 4, 5},
                            FlatShard{range, memory_order(stored)},
                            memory.slice(0, range.begin, range.end)};
    int64_t elements = 0;
    for (const HeldBox& held : held_boxes(shard)) {
      EXPECT_TRUE(held.elements.equal(part_of(logical, held.box)));
      elements += held.box.numel();
    }
    EXPECT_EQ(elements, range.size());
  }
}

TEST(TensorShard, AFlatPartOfABoxIsItsElements) {
  const at::Tensor whole = numbered({4, 5, 6});
  const Box box{{1, 2, 3}, {2, 3, 2}};
  const at::Tensor elements = part_of(whole, box).reshape({-1});
  for (const Range range : {Range{0, 12}, {1, 11}, {5, 6}, {3, 9}, {7, 7}}) {
    const TensorShard shard{"w",
                            {4, 5, 6},
                            FlatShard{range, {0, 1, 2}, box},
                            elements.slice(0, range.begin, range.end)};
    int64_t count = 0;
    for (const HeldBox& held : held_boxes(shard)) {
      EXPECT_TRUE(held.elements.equal(part_of(whole, held.box)));
      EXPECT_EQ(intersection(held.box, box), held.box);
      count += held.box.numel();
    }
    EXPECT_EQ(count, range.size());
  }
  EXPECT_THROW(held_boxes({"w",
                           {4, 5, 6},
                           FlatShard{{0, 13}, {0, 1, 2}, box},
                           torch::zeros({13})}),
               std::invalid_argument);
}

// The pieces of a sharded optimizer whose parameters are parts already.
TEST(TensorShard, APieceOfALaidOutParameterIsItsElements) {
  const at::Tensor whole = numbered({4, 6});
  TensorLayout layout{.shape = {4, 6}, .box = {{1, 2}, {3, 4}}};
  for (const auto& range :
       {std::optional<Range>(), std::optional<Range>({2, 11})}) {
    layout.range = range;
    const at::Tensor parameter = part_of(whole, layout).contiguous();
    set_layout(parameter, layout);
    EXPECT_EQ(whole_shape(parameter), (Sizes{4, 6}));
    const at::Tensor memory = parameter.reshape({-1});
    for (const Range piece : {Range{0, memory.numel()}, {1, 6}, {4, 5}}) {
      const Placement placement = placement_of(
          {.parameter = 0, .whole = false, .range = piece}, parameter);
      int64_t count = 0;
      for (const HeldBox& held :
           held_boxes({"w",
                       {4, 6},
                       placement,
                       memory.slice(0, piece.begin, piece.end)})) {
        EXPECT_TRUE(held.elements.equal(part_of(whole, held.box)));
        count += held.box.numel();
      }
      EXPECT_EQ(count, piece.size());
    }
    for (const HeldBox& held :
         held_boxes({"w", {4, 6}, placement_of(parameter), parameter})) {
      EXPECT_TRUE(held.elements.equal(part_of(whole, held.box)));
    }
  }
}

TEST(TensorShard, WhatDoesNotFitItsPlacementIsRefused) {
  const at::Tensor five = torch::zeros({5});
  EXPECT_THROW(held_boxes({"w", {6}, Replicate{}, five}),
               std::invalid_argument);
  EXPECT_THROW(held_boxes({"w", {6}, Shard{{{0}, {4}}}, five}),
               std::invalid_argument);
  EXPECT_THROW(held_boxes({"w", {6}, FlatShard{{2, 7}, {0}}, five}),
               std::invalid_argument);
  EXPECT_EQ(held_boxes({"w", {6}, FlatShard{{1, 6}, {0}}, five}).size(), 1u);
}

}  // namespace
}  // namespace lockstep::internal
