#include <gmock/gmock.h>

#include "lockstep/state/digest.h"
#include "lockstep/state/safetensors_header.h"
#include "lockstep/state/state_tree.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

TEST(StateTree, TypesCountAndTheOrderOfItemsDoesNot) {
  EXPECT_FALSE(StateTree(1) == StateTree(1.0));
  EXPECT_FALSE(StateTree(true) == StateTree(1));
  EXPECT_EQ(StateTree("a"), StateTree(std::string("a")));
  StateTree::Dict one;
  one.set("a", 1);
  one.set("b", StateTree::List{2.5, "c"});
  StateTree::Dict other;
  other.set("b", StateTree::List{2.5, "c"});
  EXPECT_FALSE(one == other);
  other.set("a", 1);
  EXPECT_EQ(one, other);
  other.set("a", StateTree());
  EXPECT_FALSE(one == other);
}

TEST(StateTree, AnItemIsReplacedInItsPlace) {
  StateTree::Dict dict;
  dict.set("a", 1);
  dict.set("b", 2);
  dict.set("a", 3);
  ASSERT_EQ(dict.items.size(), 2u);
  EXPECT_EQ(dict.items[0].first, "a");
  EXPECT_EQ(*dict.find("a")->as<int64_t>(), 3);
  EXPECT_EQ(dict.find("a")->as<double>(), nullptr);
  dict.erase("a");
  dict.erase("none");
  EXPECT_EQ(dict.find("a"), nullptr);
  EXPECT_EQ(dict.items.size(), 1u);
}

TEST(StateTree, AMissingEntryNamesItsOwner) {
  EXPECT_EQ(state_entry({{"epoch", 3}}, "epoch", "RandomSampler"), 3);
  EXPECT_THAT(
      message_of([] { state_entry({{"epoch", 3}}, "seed", "RandomSampler"); }),
      HasSubstr("RandomSampler: the state has no entry \"seed\""));
}

// The values are those of the reference (RFC 9923, appendix C).
TEST(Digest, IsFnv1a) {
  const auto digest = [](std::string_view text) {
    Digest all;
    all.add(text);
    return all.value();
  };
  EXPECT_EQ(digest(""), 0xcbf29ce484222325);
  EXPECT_EQ(digest("a"), 0xaf63dc4c8601ec8c);
  EXPECT_EQ(digest("foobar"), 0x85944171f73967e8);
}

std::string refusal(const std::string& header, uint64_t bytes = 8) {
  return message_of([&] { parse_safetensors_header(header, bytes); });
}

TEST(SafetensorsHeader, TensorsAreInTheOrderOfTheirBytes) {
  const auto content = parse_safetensors_header(
      R"({"b": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
          "a": {"dtype": "U8", "shape": [], "data_offsets": [8, 9]},
          "__metadata__": {"format": "pt"}})",
      9);
  ASSERT_EQ(content.tensors.size(), 2u);
  EXPECT_EQ(content.tensors[0].name, "b");
  EXPECT_EQ(content.tensors[0].shape, (std::vector<int64_t>{1, 2}));
  EXPECT_STREQ(content.tensors[1].dtype->torch_name, "Byte");
  EXPECT_EQ(content.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, WhatDoesNotCoverTheBytesOnceIsRefused) {
  const std::string whole =
      R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  EXPECT_EQ(refusal(whole), "");
  for (const uint64_t bytes : {0, 7, 9}) EXPECT_NE(refusal(whole, bytes), "");
  for (const char* entry :
       {R"("dtype": "F32", "shape": [3], "data_offsets": [0, 8])",
        R"("dtype": "F33", "shape": [2], "data_offsets": [0, 8])",
        R"("dtype": "F32", "shape": [-2], "data_offsets": [0, 8])",
        R"("dtype": "F32", "shape": [1], "data_offsets": [4, 8])",
        R"("dtype": "F32", "shape": [2], "data_offsets": [8, 0])",
        R"("dtype": "F32", "shape": [2])"}) {
    EXPECT_NE(refusal(R"({"a": {)" + std::string(entry) + "}}"), "") << entry;
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
