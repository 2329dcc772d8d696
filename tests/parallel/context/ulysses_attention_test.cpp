// Attention with exchanged heads equals attention over whole sequences.

#include "lockstep/parallel/context/ulysses_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/context/whole_sequences.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::on_both_backends;
using testing::Sequences;

constexpr double kUlyssesBound = 1e-10;

void expect_same_by_heads(const Sequences& given,
                          const UlyssesAttentionOptions& options) {
  SCOPED_TRACE(testing::describe(given));
  const auto errors = testing::errors_of(
      given, [&](const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
        return ulysses_attention(query, key, value, options);
      });
  EXPECT_LE(errors.output, kUlyssesBound);
  EXPECT_LE(errors.query, kUlyssesBound);
  EXPECT_LE(errors.key, kUlyssesBound);
  EXPECT_LE(errors.value, kUlyssesBound);
}

void expect_same_by_heads(const Sequences& given) {
  expect_same_by_heads(given, {.is_causal = given.is_causal,
                               .scale = given.scale,
                               .order = given.order});
}

WORLD_TEST(UlyssesAttention, EqualsOneProcess, 1, 2, 3, 4) {
  on_both_backends([&] {
    for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
      for (bool is_causal : {false, true}) {
        for (int64_t tokens : {48, 13}) {
          expect_same_by_heads({.tokens = tokens,
                                .heads = 12,
                                .key_heads = 12,
                                .is_causal = is_causal,
                                .order = order});
        }
      }
    }
  });
}

WORLD_TEST(UlyssesAttention, EqualsItWithUnevenLengths, 3) {
  auto group = init_process_group();
  for (bool is_causal : {false, true}) {
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{1, 6, 2}, {0, 5, 4}, {9, 0, 0}}) {
      expect_same_by_heads({.tokens = 9,
                            .heads = 3,
                            .key_heads = 3,
                            .is_causal = is_causal,
                            .lengths = lengths});
    }
  }
}

WORLD_TEST(UlyssesAttention, EqualsItWithFewerKeyHeads, 2) {
  auto group = init_process_group();
  expect_same_by_heads({.tokens = 11,
                        .heads = 8,
                        .key_heads = 2,
                        .is_causal = true,
                        .order = ContextOrder::zigzag});
}

// Tests the recommendation of the error for too few key heads. (repeat()
// instead of repeat_interleave() would give queries the keys of other heads.)
WORLD_TEST(UlyssesAttention, EqualsItWithRepeatedKeyHeads, 2, 4) {
  auto group = init_process_group();
  for (const int64_t key_heads : {1, 3, 6}) {
    const Sequences given{.tokens = 11,
                          .heads = 12,
                          .key_heads = key_heads,
                          .is_causal = true,
                          .order = ContextOrder::zigzag};
    const int64_t times = std::lcm(key_heads, world.size) / key_heads;
    const UlyssesAttentionOptions options{.is_causal = true,
                                          .order = given.order};
    const auto errors = testing::errors_of(given, [&](const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value) {
      if (times > 1) {
        EXPECT_THAT(
            message_of([&] { ulysses_attention(query, key, value, options); }),
            HasSubstr("repeat_interleave(" + std::to_string(times) +
                      ", /*dim=*/1)"));
      }
      return ulysses_attention(query, key.repeat_interleave(times, 1),
                               value.repeat_interleave(times, 1), options);
    });
    for (const double error :
         {errors.output, errors.query, errors.key, errors.value}) {
      EXPECT_LE(error, kUlyssesBound) << key_heads;
    }
  }
}

WORLD_TEST(UlyssesAttention, EqualsItWithScaleAndKeysOfAnotherSequence, 2) {
  auto group = init_process_group();
  expect_same_by_heads({.scale = 0.3, .key_tokens = 7});
}

// The exchange rounds nothing: the error is that of one kernel.
WORLD_TEST(UlyssesAttention, TakesHalfTypes, 2) {
  auto group = init_process_group();
  const Sequences given{.is_causal = true, .dtype = at::kBFloat16};
  const testing::Attention one = [](const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& value) {
    return at::scaled_dot_product_attention(query, key, value, {}, 0, true);
  };
  const auto whole = testing::errors_of_whole(given, one);
  const auto parts = testing::errors_of(
      given, [&](const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
        return ulysses_attention(query, key, value, {.attention = one});
      });
  EXPECT_NEAR(parts.output, whole.output, 1e-6);
  EXPECT_NEAR(parts.query, whole.query, 1e-6);
  EXPECT_NEAR(parts.key, whole.key, 1e-6);
  EXPECT_NEAR(parts.value, whole.value, 1e-6);
}

// A function of the user sees whole sequences in their order.
WORLD_TEST(UlyssesAttention, TakesAnotherAttention, 1, 2) {
  auto group = init_process_group();
  const Sequences given{
      .tokens = 11, .is_causal = true, .order = ContextOrder::zigzag};
  expect_same_by_heads(
      given, {.order = given.order,
              .attention = [](const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value) {
                auto mask = torch::ones({11, 11}, at::kBool).tril();
                return at::scaled_dot_product_attention(query, key, value,
                                                        mask);
              }});
}

WORLD_TEST(UlyssesAttention, HasASecondDerivative, 1, 2) {
  auto group = init_process_group();
  torch::manual_seed(3);
  auto whole = torch::randn({1, 2, 6, 4}, at::kDouble);
  auto second = [](const at::Tensor& values, const auto& attention) {
    auto query = values.clone().requires_grad_();
    auto first = torch::autograd::grad({attention(query).square().sum()},
                                       {query}, {}, true, true)[0];
    return torch::autograd::grad({first.square().sum()}, {query})[0];
  };
  auto by_products = [](const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value) {
    return testing::attention_by_formula(
        {.heads = 1, .key_heads = 1, .head_dim = 4}, query, key, value);
  };
  auto want = second(whole, [&](const at::Tensor& query) {
    return by_products(query, query, query);
  });
  auto have = second(context_shard(whole, 2), [&](const at::Tensor& query) {
    return ulysses_attention(query, query, query, {.attention = by_products});
  });
  EXPECT_TRUE(have.allclose(context_shard(want, 2), 0, kUlyssesBound));
}

WORLD_TEST(UlyssesAttention, MistakesAreNamed, 2) {
  auto group = init_process_group();
  auto error = [](int64_t heads, int64_t key_heads,
                  const UlyssesAttentionOptions& options = {}) {
    auto query = torch::zeros({1, heads, 4, 8});
    auto key = torch::zeros({1, key_heads, 4, 8});
    return message_of([&] { ulysses_attention(query, key, key, options); });
  };
  EXPECT_EQ(error(3, 3),
            "ulysses_attention: the numbers of heads and of key heads must be "
            "multiples of the 2 ranks, got 3 and 3; use fewer ranks, or use "
            "ring_attention()");
  EXPECT_THAT(error(4, 1),
              HasSubstr("of the 2 ranks, got 4 and 1; repeat keys and values, "
                        "repeat_interleave(2, /*dim=*/1), use fewer ranks"));
  EXPECT_THAT(error(4, 4, {.dropout_p = 0.5}),
              HasSubstr("ulysses_attention: dropout_p is 0.5"));
  auto first_head = [](const at::Tensor& query, const at::Tensor&,
                       const at::Tensor&) { return query.narrow(1, 0, 1); };
  EXPECT_EQ(error(4, 4, {.is_causal = true, .attention = first_head}),
            "ulysses_attention: is_causal or scale was given beside "
            "attention; leave them, the function computes all");
  EXPECT_EQ(error(4, 4, {.attention = first_head}),
            "ulysses_attention: attention returned shape [1, 1, 8, 8], but it "
            "must return the query's, [1, 2, 8, 8]");
  auto part = torch::zeros({1, 2, world.rank == 0 ? 4 : 2, 8});
  EXPECT_THAT(message_of([&] {
                ulysses_attention(part, part, part,
                                  {.order = ContextOrder::zigzag});
              }),
              HasSubstr("ulysses_attention: rank 0 of the group has 4 of 6 "
                        "tokens, but in zigzag order it must have 3"));
}

}  // namespace
}  // namespace lockstep::internal
