#include "lockstep/parallel/mesh/mesh_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

using Ranks = std::vector<int>;
using Groups = std::vector<Ranks>;

TEST(MeshLayout, CountsRanksRowByRow) {
  const MeshLayout layout({{"data", 2}, {"shard", 3}, {"tensor", 2}}, 12);
  EXPECT_EQ(layout.size(), 12);
  EXPECT_EQ(layout.size("shard"), 3);
  EXPECT_EQ(layout.to_string(), "data 2 x shard 3 x tensor 2");
  EXPECT_THAT(layout.coordinates(0), ElementsAre(0, 0, 0));
  EXPECT_THAT(layout.coordinates(1), ElementsAre(0, 0, 1));
  EXPECT_THAT(layout.coordinates(9), ElementsAre(1, 1, 1));
  EXPECT_EQ(layout.coordinate(9, "data"), 1);
  EXPECT_EQ(layout.groups("tensor"),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}}));
  EXPECT_EQ(layout.groups("shard"),
            (Groups{{0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}}));
  EXPECT_EQ(layout.groups("data"),
            (Groups{{0, 6}, {1, 7}, {2, 8}, {3, 9}, {4, 10}, {5, 11}}));
  EXPECT_EQ(layout.group_of(7, "shard"), (Ranks{7, 9, 11}));
}

TEST(MeshLayout, OneSizeMayBeTheRest) {
  const MeshLayout layout({{"data", -1}, {"tensor", 4}}, 1024);
  EXPECT_EQ(layout.size("data"), 256);
  EXPECT_EQ(MeshLayout({{"data", -1}}, 7).size("data"), 7);
}

TEST(MeshLayout, AnAxisOfOneRankHasGroupsOfOne) {
  const MeshLayout layout({{"data", 1}, {"tensor", 3}}, 3);
  EXPECT_EQ(layout.groups("data"), (Groups{{0}, {1}, {2}}));
  EXPECT_EQ(layout.groups("tensor"), (Groups{{0, 1, 2}}));
  EXPECT_THAT(layout.key("data"), IsEmpty());
}

// Checks a layout of a large world against what the definition says, rank by
// rank.
void expect_partition(const MeshLayout& layout, const std::string& name) {
  std::vector<int> seen(layout.world_size());
  for (const auto& group : layout.groups(name)) {
    ASSERT_EQ(static_cast<int>(group.size()), layout.size(name));
    EXPECT_TRUE(std::ranges::is_sorted(group));
    for (size_t place = 0; place < group.size(); ++place) {
      ++seen[group[place]];
      EXPECT_EQ(layout.coordinate(group[place], name), static_cast<int>(place));
      EXPECT_EQ(layout.group_of(group[place], name), group);
    }
  }
  EXPECT_EQ(std::ranges::count(seen, 1), layout.world_size()) << name;
}

TEST(MeshLayout, EachRankOfALargeWorldIsInOneGroupOfAnAxis) {
  for (const int data : {2, 4, 8}) {
    MeshLayout layout({{"pipeline", 4},
                       {"data", data},
                       {"shard", 2},
                       {"context", 2},
                       {"tensor", 8}},
                      128 * data);
    layout.flatten({"data", "context"}, "data_context");
    layout.flatten({"shard", "tensor"}, "shard_tensor");
    for (const auto* name : {"pipeline", "data", "shard", "context", "tensor",
                             "data_context", "shard_tensor"}) {
      expect_partition(layout, name);
    }
  }
  const MeshLayout wide({{"data", 10'000}, {"tensor", 3}}, 30'000);
  EXPECT_EQ(wide.group_of(29'999, "data").size(), 10'000U);
  EXPECT_EQ(wide.group_of(29'999, "data")[1], 5);
}

TEST(MeshLayout, APartHasTheGroupsOfTheWhole) {
  const MeshLayout layout({{"data", 2}, {"shard", 2}, {"tensor", 2}}, 8);
  const auto part = layout[{"data", "tensor"}];
  EXPECT_EQ(part.size(), 4);
  EXPECT_EQ(part.world_size(), 8);
  EXPECT_EQ(part.groups("data"), layout.groups("data"));
  EXPECT_EQ(part.group_of(7), (Ranks{2, 3, 6, 7}));
  EXPECT_THAT(part.coordinates(6), ElementsAre(1, 0));
  const auto smaller = part[{"data"}];
  EXPECT_EQ(smaller.group_of(7), (Ranks{3, 7}));
  EXPECT_THAT([&] { part.size("shard"); },
              ThrowsMessage<std::invalid_argument>(
                  "mesh data 2 x tensor 2 has no axis \"shard\"; it has "
                  "\"data\", \"tensor\""));
}

TEST(MeshLayout, FlattenedAxesHaveNamesOfTheirOwn) {
  MeshLayout layout({{"data", 2}, {"context", 2}, {"tensor", 2}}, 8);
  layout.flatten({"data", "context"}, "data_context");
  EXPECT_EQ(layout.size("data_context"), 4);
  EXPECT_EQ(layout.groups("data_context"),
            (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(layout.coordinate(6, "data_context"), 3);
  EXPECT_THAT(layout.names(), ElementsAre("data", "context", "tensor"));
  // Axes that are not neighbours.
  layout.flatten({"data", "tensor"}, "outer");
  EXPECT_EQ(layout.groups("outer"), (Groups{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  // A flattened axis is an axis of a part.
  const auto part = layout[{"data_context", "tensor"}];
  EXPECT_EQ(part.size(), 8);
  EXPECT_EQ(part.groups("data_context"), layout.groups("data_context"));
  EXPECT_FALSE(part.has("outer"));
  EXPECT_FALSE(layout[{"data"}].has("data_context"));
  const auto both = layout[{"data", "context"}];
  EXPECT_EQ(both[{"data_context"}].group_of(3), (Ranks{1, 3, 5, 7}));
  layout.flatten({"data", "context"}, "data_context");  // once more
  // A flattened axis and another one make a further one.
  layout.flatten({"data_context", "tensor"}, "world");
  EXPECT_EQ(layout.group_of(5, "world").size(), 8U);
}

TEST(MeshLayout, EqualGroupsHaveEqualKeys) {
  MeshLayout layout({{"data", 2}, {"one", 1}, {"context", 3}, {"tensor", 2}},
                    12);
  layout.flatten({"data", "context"}, "a");
  layout.flatten({"data", "one", "context"}, "b");
  layout.flatten({"data", "tensor"}, "c");
  layout.flatten({"one", "context"}, "d");
  layout.flatten({"data", "one", "context", "tensor"}, "world");
  EXPECT_EQ(layout.key("a"), layout.key("b"));
  EXPECT_EQ(layout.key("a").size(), 1U);
  EXPECT_EQ(layout.key("c").size(), 2U);
  EXPECT_EQ(layout.key("d"), layout.key("context"));
  EXPECT_NE(layout.key("data"), layout.key("tensor"));
  EXPECT_EQ(layout.key("world"), (std::vector<MeshLayout::Step>{{12, 1}}));
}

TEST(MeshLayout, EachMistakeIsOneLineThatSaysWhatToDo) {
  struct Mistake {
    std::vector<MeshAxis> axes;
    int world_size;
    std::string line;
  };
  const std::vector<Mistake> mistakes{
      {{{"data", 2}, {"tensor", 3}},
       8,
       "mesh data 2 x tensor 3 for a world of 8 ranks: the product of the "
       "sizes is 6; it must be 8, so change a size, give one axis -1 for the "
       "rest, or start 6 ranks"},
      {{{"data", -1}, {"tensor", 3}},
       8,
       "mesh data -1 x tensor 3 for a world of 8 ranks: the other sizes are 3 "
       "together, which does not divide 8, so nothing is left for \"data\"; "
       "change the sizes or the number of ranks"},
      {{{"data", -1}, {"tensor", -1}}, 8, "two sizes are -1"},
      {{{"data", 2}, {"data", 4}}, 8, "two axes are named \"data\""},
      {{{"data", 2}, {"", 4}}, 8, "axis 1 has no name"},
      {{{"data", 0}, {"tensor", 4}}, 8, "the size of \"data\" is 0"},
      {{{"data", -2}}, 8, "the size of \"data\" is -2"},
      {{{"data", 1 << 20}, {"tensor", 1 << 20}}, 8, "it must be 8"},
      {{},
       8,
       "there are no axes; give at least one, for example {{\"data\", "
       "8}}"},
      {{{"data", 1}}, 0, "the world size is 0"},
  };
  for (const auto& [axes, world_size, line] : mistakes) {
    EXPECT_THAT([&] { MeshLayout(axes, world_size); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr(line), Not(HasSubstr("\n")))));
  }
  MeshLayout layout({{"data", 2}, {"context", 2}, {"tensor", 2}}, 8);
  layout.flatten({"data", "context"}, "data_context");
  const auto expect = [&](auto&& action, const std::string& line) {
    EXPECT_THAT(action, ThrowsMessage<std::invalid_argument>(
                            AllOf(HasSubstr(line), Not(HasSubstr("\n")))));
  };
  expect([&] { layout.size("pipeline"); },
         "mesh data 2 x context 2 x tensor 2 has no axis \"pipeline\"; it has "
         "\"data\", \"context\", \"tensor\", \"data_context\"");
  expect([&] { auto part = layout[{"tensor", "data"}]; },
         "\"tensor\", \"data\" are not in the order of its axes, or contain an "
         "axis twice; give different axes in the order \"data\", \"context\", "
         "\"tensor\"");
  expect([&] { auto part = layout[{"data", "data"}]; }, "an axis twice");
  expect([&] { auto part = layout[{"data_context", "context"}]; },
         "an axis twice");
  expect([&] { auto part = layout[std::vector<std::string>{}]; },
         "no names were given");
  expect([&] { layout.flatten({"data", "context"}, ""); }, "\"data_context\"");
  expect([&] { layout.flatten({"data", "context"}, "tensor"); },
         "has an axis \"tensor\" already, which is not \"data\", \"context\"");
  expect([&] { layout.flatten({"data", "tensor"}, "data_context"); },
         "already");
  expect([&] { layout.coordinate(8, "data"); }, "its ranks are 0 to 7");
  expect([&] { layout.group_of(-1, "data"); }, "has no rank -1");
}

}  // namespace
}  // namespace lockstep::internal
