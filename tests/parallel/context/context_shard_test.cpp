// Which tokens each rank has, and which queries meet which keys.

#include "lockstep/parallel/context/context_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/context_chunks.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using testing::message_of;

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  auto flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(),
          flat.const_data_ptr<int64_t>() + flat.numel()};
}

std::vector<Range> chunks(ContextOrder order, int64_t length, int ranks,
                          int rank) {
  return context_chunks(order, length, ranks, rank);
}

TEST(ContextChunks, AreThoseOfTensorSplit) {
  const auto plain = ContextOrder::plain;
  EXPECT_THAT(chunks(plain, 10, 3, 0), ElementsAre(Range{0, 4}));
  EXPECT_THAT(chunks(plain, 10, 3, 1), ElementsAre(Range{4, 7}));
  EXPECT_THAT(chunks(plain, 10, 3, 2), ElementsAre(Range{7, 10}));
  const auto zigzag = ContextOrder::zigzag;
  EXPECT_THAT(chunks(zigzag, 8, 2, 0), ElementsAre(Range{0, 2}, Range{6, 8}));
  EXPECT_THAT(chunks(zigzag, 8, 2, 1), ElementsAre(Range{2, 4}, Range{4, 6}));
  EXPECT_THAT(chunks(zigzag, 10, 2, 0), ElementsAre(Range{0, 3}, Range{8, 10}));
  EXPECT_THAT(chunks(zigzag, 10, 2, 1), ElementsAre(Range{3, 6}, Range{6, 8}));
  // Fewer tokens than chunks, and than ranks.
  EXPECT_THAT(chunks(zigzag, 3, 2, 0), ElementsAre(Range{0, 1}, Range{3, 3}));
  EXPECT_THAT(chunks(zigzag, 3, 2, 1), ElementsAre(Range{1, 2}, Range{2, 3}));
  EXPECT_THAT(chunks(plain, 1, 2, 1), ElementsAre(Range{1, 1}));
}

WORLD_TEST(ContextShard, PositionsAreThoseOfTheOrder, 2) {
  auto group = init_process_group();
  const bool first = world.rank == 0;
  EXPECT_EQ(numbers(context_positions(5)), first
                                               ? (std::vector<int64_t>{0, 1, 2})
                                               : (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(numbers(context_positions(8, {.order = ContextOrder::zigzag})),
            first ? (std::vector<int64_t>{0, 1, 6, 7})
                  : (std::vector<int64_t>{2, 3, 4, 5}));
}

WORLD_TEST(ContextShard, CutsAndRestores, 1, 2, 3, 4) {
  auto group = init_process_group();
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    for (int64_t tokens : {0, 1, 2, 3, 7, 16, 25}) {
      SCOPED_TRACE(tokens);
      auto whole = torch::arange(tokens * 6).view({2, tokens, 3});
      auto part = context_shard(whole, 1, {.order = order});
      EXPECT_TRUE(part.is_contiguous());
      EXPECT_TRUE(part.equal(context_shard(whole, -2, {.order = order})));
      EXPECT_TRUE(part.equal(
          whole.index_select(1, context_positions(tokens, {.order = order}))));
      EXPECT_TRUE(context_unshard(part, 1, {.order = order}).equal(whole));
    }
  }
}

WORLD_TEST(ContextShard, HasMemoryOfItsOwn, 1, 2) {
  auto group = init_process_group();
  auto whole = torch::zeros({4, 2});
  context_shard(whole, 0).fill_(1);
  EXPECT_EQ(whole.sum().item<float>(), 0);
}

WORLD_TEST(ContextShard, RestoresPartsOfAnyLength, 3) {
  auto group = init_process_group();
  const std::vector<int64_t> lengths{2, 0, 5};
  auto whole = torch::arange(14).view({7, 2});
  auto part = whole.narrow(0, world.rank == 0 ? 0 : 2,
                           lengths[static_cast<size_t>(world.rank)]);
  EXPECT_TRUE(context_unshard(part, 0).equal(whole));
  EXPECT_EQ(message_of([&] {
              context_unshard(part, 0, {.order = ContextOrder::zigzag});
            }),
            "context_unshard: rank 0 of the group has 2 of 7 tokens, but in "
            "zigzag order it must have 3; cut sequences with context_shard(), "
            "or use the plain order");
}

WORLD_TEST(ContextShard, GradientIsThatOfTheOwnTokens, 2) {
  auto group = init_process_group();
  auto whole = torch::zeros({8}).requires_grad_();
  context_shard(whole, 0, {.order = ContextOrder::zigzag}).sum().backward();
  auto want = torch::zeros({8}).index_fill(
      0, context_positions(8, {.order = ContextOrder::zigzag}), 1);
  EXPECT_TRUE(whole.grad().equal(want));
}

WORLD_TEST(ContextShard, MistakesAreNamed, 1) {
  auto group = init_process_group();
  EXPECT_EQ(message_of([] { context_shard(torch::zeros({4, 2}), 2); }),
            "context_shard: dim is 2, but the tensor has 2 dimensions; name "
            "the one that is the sequence");
  EXPECT_EQ(message_of([] { context_unshard(torch::zeros({4}), -2); }),
            "context_unshard: dim is -2, but the tensor has 1 dimensions; name "
            "the one that is the sequence");
  EXPECT_EQ(message_of([] { context_positions(-1); }),
            "context_positions: the sequence length is -1; it must be 0 or "
            "more");
}

// Counts how often each query meets each key, by places in the sequence.
at::Tensor meetings(const RingPlan& plan, ContextOrder order, int64_t tokens,
                    const std::vector<int64_t>& lengths) {
  const int ranks = plan.ranks();
  std::vector<at::Tensor> positions;
  int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<at::Tensor> own;
    if (order == ContextOrder::plain) {
      const int64_t length = lengths[static_cast<size_t>(rank)];
      own.push_back(torch::arange(begin, begin + length));
      begin += length;
    } else {
      for (auto chunk : context_chunks(order, tokens, ranks, rank)) {
        own.push_back(torch::arange(chunk.begin, chunk.end));
      }
    }
    positions.push_back(at::cat(own));
  }
  auto counts = torch::zeros({tokens, tokens}, at::kLong);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int source = 0; source < ranks; ++source) {
      auto block = plan.block(rank, source);
      if (!block) continue;
      for (int64_t q = block->queries.begin; q < block->queries.end; ++q) {
        for (int64_t k = block->keys.begin; k < block->keys.end; ++k) {
          if (block->causal && k > q) continue;
          auto query = positions[static_cast<size_t>(rank)][q];
          auto key = positions[static_cast<size_t>(source)][k];
          counts[query.item<int64_t>()][key.item<int64_t>()] += 1;
        }
      }
    }
  }
  return counts;
}

TEST(RingPlan, EveryQueryMeetsItsKeysOnce) {
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    for (bool is_causal : {false, true}) {
      for (int ranks : {1, 2, 3, 4}) {
        for (int64_t tokens : {1, 3, 6, 11}) {
          std::vector<int64_t> lengths;
          for (int rank = 0; rank < ranks; ++rank) {
            lengths.push_back(context_tokens(order, tokens, ranks, rank));
          }
          RingPlan plan({lengths, lengths}, order, is_causal);
          auto want = torch::ones({tokens, tokens}, at::kLong);
          if (is_causal) want = want.tril();
          EXPECT_TRUE(meetings(plan, order, tokens, lengths).equal(want))
              << ranks << " ranks, " << tokens << " tokens";
        }
      }
    }
  }
  const std::vector<int64_t> lengths{0, 3, 0, 5};
  RingPlan plan({lengths, lengths}, ContextOrder::plain, true);
  EXPECT_TRUE(meetings(plan, ContextOrder::plain, 8, lengths)
                  .equal(torch::ones({8, 8}, at::kLong).tril()));
}

TEST(RingPlan, BlocksEndAtTheLastRankThatNeedsThem) {
  auto hops = [](const std::vector<int64_t>& lengths, ContextOrder order,
                 bool is_causal) {
    RingPlan plan({lengths, lengths}, order, is_causal);
    std::vector<int> all;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      all.push_back(plan.hops(rank));
    }
    return all;
  };
  EXPECT_THAT(hops({2, 2, 2}, ContextOrder::plain, false),
              ElementsAre(2, 2, 2));
  EXPECT_THAT(hops({2, 2, 2}, ContextOrder::plain, true), ElementsAre(2, 1, 0));
  EXPECT_THAT(hops({2, 2, 2}, ContextOrder::zigzag, true),
              ElementsAre(2, 2, 2));
  EXPECT_THAT(hops({2, 2, 0}, ContextOrder::plain, false),
              ElementsAre(1, 2, 0));
  EXPECT_THAT(hops({0, 3, 0, 5}, ContextOrder::plain, true),
              ElementsAre(0, 2, 0, 0));
}

// With a causal mask in zigzag order all ranks have equally much to do.
TEST(RingPlan, ZigzagOrderBalancesCausalAttention) {
  constexpr int kRanks = 4;
  const std::vector<int64_t> lengths(kRanks, 8);
  RingPlan plan({lengths, lengths}, ContextOrder::zigzag, true);
  for (int rank = 0; rank < kRanks; ++rank) {
    int64_t products = 0;
    for (int source = 0; source < kRanks; ++source) {
      auto block = plan.block(rank, source);
      ASSERT_TRUE(block.has_value());
      if (rank != source) {
        products += block->queries.size() * block->keys.size();
      }
    }
    EXPECT_EQ(products, (kRanks - 1) * 8 * 4);
  }
}

}  // namespace
}  // namespace lockstep::internal
