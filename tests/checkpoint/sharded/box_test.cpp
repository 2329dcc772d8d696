#include "lockstep/state/box.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <optional>

#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

at::Tensor numbered(const Sizes& shape) {
  return torch::arange(numel_of(shape), torch::kLong).view(shape);
}

at::Tensor part_of(const at::Tensor& tensor, const Box& box) {
  return narrow_to(tensor, whole_box(tensor.sizes().vec()), box);
}

const Sizes kShapes[] = {{},     {1},       {7},       {3, 4},       {1, 5},
                         {5, 1}, {2, 3, 4}, {3, 1, 2}, {2, 1, 2, 3}, {1, 1}};

TEST(Box, EveryRangeIsItsElementsInTheirOrder) {
  for (const Sizes& shape : kShapes) {
    const at::Tensor tensor = numbered(shape);
    for (int64_t begin = 0; begin <= tensor.numel(); ++begin) {
      for (int64_t end = begin; end <= tensor.numel(); ++end) {
        const auto boxes = boxes_of_range(shape, {begin, end});
        EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
        std::vector<at::Tensor> parts{torch::empty({0}, torch::kLong)};
        for (const Box& box : boxes) {
          parts.push_back(part_of(tensor, box).flatten());
        }
        EXPECT_TRUE(torch::cat(parts).equal(torch::arange(begin, end)))
            << tensor.sizes() << " " << begin << " " << end;
      }
    }
  }
}

TEST(Box, WholeRowsAreOneBox) {
  EXPECT_THAT(boxes_of_range({4, 5}, {5, 20}),
              ElementsAre(Box{{1, 0}, {3, 5}}));
  EXPECT_THAT(boxes_of_range({4, 5}, {3, 18}),
              ElementsAre(Box{{0, 3}, {1, 2}}, Box{{1, 0}, {2, 5}},
                          Box{{3, 0}, {1, 3}}));
  EXPECT_THAT(boxes_of_range({4, 5}, {7, 7}), IsEmpty());
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

TEST(Box, WhatIsNotTheWholeTensorIsNamed) {
  EXPECT_EQ(cover_problem({4, 3}, {{{0, 0}, {4, 3}}}), "");
  EXPECT_EQ(cover_problem({4, 3}, boxes_of_range({4, 3}, {0, 12})), "");
  EXPECT_EQ(cover_problem({}, {Box{}}), "");
  EXPECT_EQ(cover_problem({0, 3}, {{{0, 0}, {0, 3}}}), "");
  EXPECT_EQ(cover_problem({4, 3}, {{{0, 0}, {2, 3}}, {{2, 0}, {1, 3}}}),
            "its parts have 9 of 12 elements");
  EXPECT_EQ(cover_problem({4, 3}, {{{0, 0}, {3, 3}}, {{2, 1}, {2, 1}}}),
            "two parts overlap at [2:3, 1:2]");
  EXPECT_EQ(cover_problem({4, 3}, {{{0, 0}, {4, 3}}, {{0, 0}, {4, 3}}}),
            "two parts overlap at [0:4, 0:3]");
  EXPECT_EQ(cover_problem({4, 3}, {{{2, 0}, {3, 3}}}),
            "[2:5, 0:3] lies outside");
  EXPECT_EQ(cover_problem({}, {Box{}, Box{}}), "two parts overlap at []");
  // As many elements as the tensor has, but not its own.
  EXPECT_EQ(cover_problem({2, 2}, {{{0, 0}, {1, 2}}, {{0, 0}, {1, 2}}}),
            "two parts overlap at [0:1, 0:2]");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() - 1;
  EXPECT_NE(cover_problem({4}, {{{kHuge}, {1}}}), "");
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
