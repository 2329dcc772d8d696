#include "lockstep/checkpoint/sharded/save_plan.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using Shards = std::vector<TensorShard>;

TensorShard replicated(const std::string& name, const at::Tensor& tensor) {
  return {name, tensor.sizes().vec(), Replicate{}, tensor};
}

SavePlan plan_of(const std::vector<Shards>& by_rank) {
  std::vector<nlohmann::json> claims;
  for (const Shards& shards : by_rank) claims.push_back(claims_of(shards));
  return plan_save(claims);
}

// Returns the bytes that each rank writes.
std::vector<int64_t> bytes_of(const SavePlan& plan) {
  std::vector<int64_t> bytes(plan.files.size());
  for (const SavePlan::Part& part : plan.parts) {
    bytes[part.rank] += part.box.numel() *
                        static_cast<int64_t>(
                            c10::elementSize(plan.tensors.at(part.name).dtype));
  }
  return bytes;
}

TEST(SavePlan, ReplicatedTensorsAreWrittenOnceAndDividedByBytes) {
  std::mt19937 random(1);
  for (const size_t ranks : {1, 2, 3, 4, 8}) {
    Shards shards;
    int64_t total = 0;
    for (int i = 0; i < 60; ++i) {
      // Among them tensors that are larger than the share of a rank.
      const int64_t rows = i % 20 == 0 ? 4000 : 1 + random() % 300;
      shards.push_back(
          replicated("t" + std::to_string(i), torch::empty({rows, 500})));
      total += rows * 500 * 4;
    }
    const SavePlan plan = plan_of(std::vector<Shards>(ranks, shards));
    const auto bytes = bytes_of(plan);
    EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), total);
    const int64_t share = total / static_cast<int64_t>(ranks);
    for (const int64_t of_rank : bytes) {
      EXPECT_NEAR(static_cast<double>(of_rank), static_cast<double>(share),
                  0.05 * static_cast<double>(share))
          << ranks;
    }
    std::map<std::string, std::vector<Box>> boxes;
    for (const auto& part : plan.parts) boxes[part.name].push_back(part.box);
    for (const TensorShard& shard : shards) {
      EXPECT_EQ(cover_problem(shard.shape, boxes.at(shard.name)), "");
    }
  }
}

TEST(SavePlan, SmallTensorsAreNotCut) {
  const SavePlan plan =
      plan_of(std::vector<Shards>(2, {replicated("w", torch::empty({100}))}));
  EXPECT_EQ(plan.parts.size(), 1u);
}

TEST(SavePlan, ATensorWithoutElementsIsWrittenOnce) {
  const SavePlan plan =
      plan_of(std::vector<Shards>(3, {replicated("w", torch::empty({0, 3}))}));
  ASSERT_EQ(plan.parts.size(), 1u);
  EXPECT_EQ(plan.parts[0].box, (Box{{0, 0}, {0, 3}}));
}

// The ranges of FSDP: no rank had a box of such a tensor, so it was listed, and
// no file held it.
TEST(SavePlan, ADividedTensorWithoutElementsIsWrittenOnce) {
  const TensorShard shard{
      "w", {0, 3}, FlatShard{{0, 0}, {0, 1}}, torch::empty({0}, torch::kHalf)};
  const std::vector<Shards> by_rank(2, {shard});
  const SavePlan plan = plan_of(by_rank);
  ASSERT_EQ(plan.parts.size(), 1u);
  EXPECT_EQ(plan.parts[0].box, (Box{{0, 0}, {0, 3}}));
  const auto entries =
      entries_of(plan, plan.parts[0].rank, by_rank[plan.parts[0].rank]);
  ASSERT_EQ(entries.at(0).size(), 1u);
  EXPECT_EQ(entries[0][0].elements.sizes(), (at::IntArrayRef{0, 3}));
  EXPECT_EQ(entries[0][0].elements.scalar_type(), torch::kHalf);
}

TEST(SavePlan, TheOwnerOfAPieceWritesIt) {
  const Sizes shape{10, 7};
  std::vector<Shards> by_rank(2);
  by_rank[0] = {{"w", shape, FlatShard{{0, 33}, {0, 1}}, torch::empty({33})}};
  by_rank[1] = {{"w", shape, FlatShard{{33, 70}, {0, 1}}, torch::empty({37})}};
  const SavePlan plan = plan_of(by_rank);
  // 33 elements are four rows and five of the fifth; the rest of it is of rank
  // 1. Parts of one tensor go to different files of a rank, the largest first.
  EXPECT_EQ(plan.files, (std::vector<size_t>{2, 2}));
  for (const SavePlan::Part& part : plan.parts) {
    EXPECT_EQ(part.rank, part.box.offsets[0] > 4 || part.box.offsets[1] > 0);
    EXPECT_EQ(part.file, part.box.sizes[0] == 1 ? 1u : 0u);
  }
  EXPECT_EQ(plan.tensors.at("w").placement, "flat");
}

// A tensor that is divided over some ranks and replicated over others, as FSDP
// and replication together make it.
TEST(SavePlan, APartThatSeveralRanksHaveIsWrittenByOneOfThem) {
  const Sizes shape{8, 4};
  std::vector<Shards> by_rank;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const Box box = chunk_box(shape, 0, rank % 2, 2);
    by_rank.push_back({{"w", shape, Shard{box}, torch::empty(box.sizes)}});
  }
  const SavePlan plan = plan_of(by_rank);
  ASSERT_EQ(plan.parts.size(), 2u);
  EXPECT_EQ(plan.parts[0].rank % 2, 0u);
  EXPECT_EQ(plan.parts[1].rank % 2, 1u);
}

// Two stages of a pipeline divide one weight each in its own way: their parts
// were taken for parts that overlap.
TEST(SavePlan, DuplicatesAreWrittenOnlyIfNobodyElseHasThem) {
  const auto part = [](int64_t begin, int64_t end, bool duplicate) {
    return TensorShard{.name = "w",
                       .shape = {6},
                       .placement = FlatShard{{begin, end}, {0}},
                       .tensor = torch::empty({end - begin}),
                       .duplicate = duplicate};
  };
  for (const bool duplicates_first : {false, true}) {
    const bool other = !duplicates_first;
    const SavePlan plan = plan_of({{part(0, 4, duplicates_first)},
                                   {part(0, 2, other)},
                                   {part(4, 6, duplicates_first)},
                                   {part(2, 6, other)}});
    ASSERT_EQ(plan.parts.size(), 2u);
    const size_t first = duplicates_first ? 1 : 0;
    EXPECT_EQ(plan.parts[0].rank, first);
    EXPECT_EQ(plan.parts[1].rank, first + 2);
  }
  EXPECT_EQ(plan_of({{part(0, 4, true)}, {part(4, 6, true)}}).parts.size(), 2u);
}

TEST(SavePlan, RanksThatDisagreeAreRefused) {
  EXPECT_THAT(message_of([] {
                plan_of({{replicated("w", torch::empty({2}))},
                         {replicated("w", torch::empty({3}))}});
              }),
              AllOf(HasSubstr("rank 1 has the tensor \"w\" as F32[3]"),
                    HasSubstr("F32[2]")));
  EXPECT_THAT(
      message_of([] {
        plan_of({{{"w", {6}, FlatShard{{0, 2}, {0}}, torch::empty({2})}},
                 {{"w", {6}, FlatShard{{3, 6}, {0}}, torch::empty({3})}}});
      }),
      AllOf(HasSubstr("tensor \"w\""),
            HasSubstr("its parts have 5 of 6 elements")));
  EXPECT_THAT(message_of([] {
                claims_of({replicated("w", torch::empty({2})),
                           replicated("w", torch::empty({2}))});
              }),
              HasSubstr("two tensors are named \"w\""));
}

TEST(SavePlan, ElementsOfAPartAreAViewOfTheShard) {
  const at::Tensor whole =
      torch::arange(3'000'000, torch::kFloat).view({-1, 3});
  const Shards shards{replicated("w", whole)};
  const SavePlan plan = plan_of(std::vector<Shards>(2, shards));
  ASSERT_EQ(plan.parts.size(), 2u);
  for (const size_t rank : {0, 1}) {
    const auto files = entries_of(plan, rank, shards);
    ASSERT_EQ(files.size(), 1u);
    EXPECT_TRUE(files[0][0].elements.is_alias_of(whole));
    EXPECT_TRUE(files[0][0].elements.equal(
        narrow_to(whole, whole_box(shards[0].shape), files[0][0].box)));
  }
}

}  // namespace
}  // namespace lockstep::internal
