#include "lockstep/state/box.h"

#include <gmock/gmock.h>

#include <limits>
#include <numeric>

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const Sizes kShapes[] = {{},     {1},       {7},       {3, 4},       {1, 5},
                         {5, 1}, {2, 3, 4}, {3, 1, 2}, {2, 1, 2, 3}, {1, 1}};

// Adds the places of the box's elements in a tensor of that shape.
void add_elements(const Sizes& shape, const Box& box,
                  std::vector<int64_t>& elements) {
  for (int64_t i = 0; i < box.numel(); ++i) {
    int64_t rest = i;
    int64_t place = 0;
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      place += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
      stride *= shape[d];
    }
    elements.push_back(place);
  }
}

TEST(Box, EveryRangeIsItsElementsInTheirOrder) {
  for (const Sizes& shape : kShapes) {
    for (int64_t begin = 0; begin <= numel_of(shape); ++begin) {
      for (int64_t end = begin; end <= numel_of(shape); ++end) {
        const auto boxes = boxes_of_range(shape, {begin, end});
        EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
        std::vector<int64_t> elements;
        for (const Box& box : boxes) add_elements(shape, box, elements);
        std::vector<int64_t> range(static_cast<size_t>(end - begin));
        std::iota(range.begin(), range.end(), begin);
        EXPECT_EQ(elements, range) << ::testing::PrintToString(shape);
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

TEST(Box, AnIntersectionHasTheElementsOfBoth) {
  const Box a{{0, 2}, {3, 4}};
  EXPECT_EQ(intersection(a, {{2, 0}, {5, 3}}), (Box{{2, 2}, {1, 1}}));
  EXPECT_EQ(intersection(a, {{3, 0}, {1, 9}}), std::nullopt);
  EXPECT_EQ(intersection({}, {}), Box{});
}

}  // namespace
}  // namespace lockstep::internal
