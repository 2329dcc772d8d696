// Ring attention over the parts of sequences equals attention over the whole.

#include "lockstep/parallel/context/ring_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/context/whole_sequences.h"

namespace lockstep::internal {
namespace {

using testing::errors_of;
using testing::errors_of_whole;
using ::testing::HasSubstr;
using testing::message_of;
using testing::on_both_backends;
using testing::Sequences;

constexpr double kDoubleBound = 1e-10;

testing::Attention ring(const Sequences& given) {
  return [given](const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
    return ring_attention(query, key, value,
                          {.is_causal = given.is_causal,
                           .scale = given.scale,
                           .order = given.order});
  };
}

void expect_same(const Sequences& given) {
  SCOPED_TRACE(testing::describe(given));
  const auto errors = errors_of(given, ring(given));
  EXPECT_LE(errors.output, kDoubleBound);
  EXPECT_LE(errors.query, kDoubleBound);
  EXPECT_LE(errors.key, kDoubleBound);
  EXPECT_LE(errors.value, kDoubleBound);
}

WORLD_TEST(RingAttention, EqualsOneProcess, 1, 2, 3, 4) {
  on_both_backends([&] {
    for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
      for (bool is_causal : {false, true}) {
        expect_same({.tokens = 48, .is_causal = is_causal, .order = order});
      }
    }
  });
}

// Python's context_parallel gave wrong results without a mask when it balanced
// the load.
WORLD_TEST(RingAttention, EqualsItWithoutAMaskInZigzagOrder, 2, 3) {
  auto group = init_process_group();
  for (int64_t tokens : {12, 13, 17}) {
    expect_same({.tokens = tokens, .order = ContextOrder::zigzag});
  }
}

WORLD_TEST(RingAttention, EqualsItInAGroupThatComparesCalls, 2) {
  auto group = init_process_group("", {.check_calls = true});
  expect_same({.is_causal = true, .order = ContextOrder::zigzag});
}

WORLD_TEST(RingAttention, EqualsItWithUnevenLengths, 2, 3, 4) {
  auto group = init_process_group();
  for (bool is_causal : {false, true}) {
    for (int64_t tokens : {1, 2, 3, 5, 9, 23}) {
      for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
        expect_same({.tokens = tokens, .is_causal = is_causal, .order = order});
      }
    }
  }
}

WORLD_TEST(RingAttention, EqualsItWithLengthsOfOnesOwn, 4) {
  on_both_backends([] {
    for (bool is_causal : {false, true}) {
      for (const std::vector<int64_t>& lengths :
           {std::vector<int64_t>{1, 6, 2, 4},
            {0, 5, 0, 8},
            {7, 0, 6, 0},
            {0, 0, 13, 0},
            {13, 0, 0, 0},
            {0, 0, 0, 13}}) {
        expect_same({.tokens = 13, .is_causal = is_causal, .lengths = lengths});
      }
    }
  });
}

WORLD_TEST(RingAttention, EqualsItInRandomCases, 2, 3, 4) {
  auto group = init_process_group();
  std::mt19937 random(11);  // the same on all ranks
  auto draw = [&](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random()) % (most - least + 1);
  };
  for (int i = 0; i < 40; ++i) {
    Sequences given{.batch = draw(1, 3), .head_dim = draw(1, 9)};
    given.key_heads = draw(1, 3);
    given.heads = given.key_heads * draw(1, 3);
    given.is_causal = draw(0, 1) == 1;
    given.tokens = draw(1, 40);
    if (draw(0, 1) == 1) {
      given.order = ContextOrder::zigzag;
    } else if (draw(0, 1) == 1) {
      given.tokens = 0;
      for (int rank = 0; rank < world.size; ++rank) {
        given.lengths.push_back(std::max<int64_t>(0, draw(-3, 12)));
        given.tokens += given.lengths.back();
      }
    }
    if (!given.is_causal && given.lengths.empty()) {
      given.key_tokens = draw(1, 40);
    }
    expect_same(given);
  }
}

WORLD_TEST(RingAttention, EqualsItWithFewerKeyHeads, 2, 3) {
  auto group = init_process_group();
  for (int64_t key_heads : {1, 2}) {
    for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
      expect_same({.tokens = 11,
                   .key_heads = key_heads,
                   .is_causal = true,
                   .order = order});
    }
  }
}

WORLD_TEST(RingAttention, EqualsItWithAScale, 2) {
  auto group = init_process_group();
  expect_same({.scale = 0.3});
  expect_same({.is_causal = true, .scale = 1.5});
  // Scores so far apart that exp() of their differences is not finite. The
  // gradients of query and key almost vanish, so their errors mean nothing.
  const Sequences far{.is_causal = true, .scale = 400};
  const auto errors = errors_of(far, ring(far));
  EXPECT_LE(errors.output, kDoubleBound);
  EXPECT_LE(errors.value, kDoubleBound);
}

WORLD_TEST(RingAttention, EqualsItWithKeysOfAnotherSequence, 2, 3) {
  auto group = init_process_group();
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    expect_same({.tokens = 10, .order = order, .key_tokens = 17});
    expect_same({.tokens = 10, .order = order, .key_tokens = 1});
  }
}

WORLD_TEST(RingAttention, EqualsItWithoutSequences, 2) {
  auto group = init_process_group();
  expect_same({.tokens = 0});
  expect_same({.batch = 0, .is_causal = true});
  expect_same({.batch = 0, .is_causal = true, .order = ContextOrder::zigzag});
}

// Projections of one tensor to query, key and value: no input is contiguous,
// and gradients of sums have no memory of their own.
WORLD_TEST(RingAttention, TakesTensorsOfAnyStrides, 2) {
  auto group = init_process_group();
  const Sequences given{.is_causal = true};
  torch::manual_seed(3);
  auto whole = torch::randn({12, 2, 4, 3, 8}, at::kDouble);
  auto weight = torch::randn({2, 4, 1, 8}, at::kDouble);
  for (bool weighted : {false, true}) {
    auto run = [&](const at::Tensor& packed,
                   const testing::Attention& attention) {
      auto leaf = packed.clone().requires_grad_();
      // [batch, heads, tokens, head_dim]
      auto parts = leaf.permute({3, 1, 2, 0, 4}).unbind(0);
      // The keys' last dimension is not dense.
      auto key = parts[1].transpose(2, 3).contiguous().transpose(2, 3);
      auto output = attention(parts[0], key, parts[2]);
      if (weighted) output = output.sum(2, /*keepdim=*/true) * weight;
      output.sum().backward();
      return leaf.grad();
    };
    auto want = run(whole, [&](const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value) {
      return testing::attention_by_formula(given, query, key, value);
    });
    auto have = run(context_shard(whole, 0), ring(given));
    EXPECT_TRUE(have.allclose(context_shard(want, 0), 0, kDoubleBound));
  }
}

WORLD_TEST(RingAttention, OneInputMayRequireGrad, 2) {
  auto group = init_process_group();
  torch::manual_seed(3);
  for (int which : {0, 1, 2}) {
    std::vector<at::Tensor> whole;
    for (int i = 0; i < 3; ++i) {
      whole.push_back(torch::randn({1, 2, 6, 4}, at::kDouble));
    }
    auto run = [&](std::vector<at::Tensor> inputs,
                   const testing::Attention& attention) {
      auto& leaf = inputs[static_cast<size_t>(which)];
      leaf = leaf.clone().requires_grad_();
      attention(inputs[0], inputs[1], inputs[2]).square().sum().backward();
      return leaf.grad();
    };
    auto want = run(whole, [](const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value) {
      return at::scaled_dot_product_attention(query, key, value);
    });
    std::vector<at::Tensor> parts;
    for (const auto& each : whole) parts.push_back(context_shard(each, 2));
    auto have = run(parts, ring({}));
    EXPECT_TRUE(have.allclose(context_shard(want, 2), 0, kDoubleBound));
  }
}

WORLD_TEST(RingAttention, WithoutGradHasTheSameOutput, 2) {
  auto group = init_process_group();
  torch::manual_seed(3 + world.rank);
  auto query = torch::randn({1, 2, 6, 4}).requires_grad_();
  auto want = ring_attention(query, query, query);
  EXPECT_TRUE(want.requires_grad());
  torch::NoGradGuard no_grad;
  auto have = ring_attention(query, query, query);
  EXPECT_FALSE(have.requires_grad());
  EXPECT_TRUE(have.equal(want));
}

// The same bits on every run: sums do not depend on which message comes first.
WORLD_TEST(RingAttention, RepeatsBitForBit, 3) {
  auto group = init_process_group();
  torch::manual_seed(3 + world.rank);
  auto query = torch::randn({2, 2, 32, 8}).requires_grad_();
  auto run = [&] {
    query.mutable_grad() = at::Tensor();
    auto output = ring_attention(query, query, query, {.is_causal = true});
    output.square().sum().backward();
    return at::stack({output.detach(), query.grad()});
  };
  const auto first = run();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(run().equal(first));
}

WORLD_TEST(RingAttention, KeepsTheGraphForASecondBackward, 2) {
  auto group = init_process_group();
  torch::manual_seed(3 + world.rank);
  auto query = torch::randn({1, 2, 6, 4}, at::kDouble).requires_grad_();
  auto loss = ring_attention(query, query, query).square().sum();
  loss.backward({}, /*keep_graph=*/true);
  const auto once = query.grad().clone();
  loss.backward();
  EXPECT_TRUE(query.grad().equal(2 * once));
}

// The bound is the error of one kernel over the whole, times 1.5, for every
// number of ranks: each block is rounded once, and the weights of blocks add up
// to 1. In double both errors would be mostly those of what they are compared
// with, which is computed in double.
WORLD_TEST(RingAttention, ErrorDoesNotGrowWithTheRing, 1, 2, 4, 8) {
  auto group = init_process_group();
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (bool is_causal : {false, true}) {
      const Sequences given{.tokens = 128,
                            .head_dim = 16,
                            .is_causal = is_causal,
                            .order = ContextOrder::zigzag,
                            .dtype = dtype};
      SCOPED_TRACE(c10::toString(dtype) + (", " + testing::describe(given)));
      const auto whole = errors_of_whole(
          given, [&](const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value) {
            return at::scaled_dot_product_attention(query, key, value, {}, 0,
                                                    is_causal);
          });
      const auto parts = errors_of(given, ring(given));
      EXPECT_LE(parts.output, 1.5 * whole.output);
      EXPECT_LE(parts.query, 1.5 * whole.query);
      EXPECT_LE(parts.key, 1.5 * whole.key);
      EXPECT_LE(parts.value, 1.5 * whole.value);
    }
  }
}

WORLD_TEST(RingAttention, ComputesInTheDtypeOfAutocast, 1, 2) {
  auto group = init_process_group();
  torch::manual_seed(3);
  auto query = torch::randn({1, 2, 6, 4});
  Autocast mixed(at::kCPU);
  auto output = ring_attention(query, query.to(at::kBFloat16), query);
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
}

WORLD_TEST(RingAttention, WorksInASubgroup, 4) {
  auto whole_group = init_process_group();
  auto groups = new_subgroups(2);
  torch::manual_seed(3 + world.rank / 2);
  auto whole = torch::randn({1, 2, 9, 4}, at::kDouble);
  auto part = context_shard(whole, 2, {.group = groups});
  auto have =
      ring_attention(part, part, part, {.group = groups, .is_causal = true});
  auto want =
      at::scaled_dot_product_attention(whole, whole, whole, {}, 0, true);
  EXPECT_TRUE(
      context_unshard(have, 2, {.group = groups}).allclose(want, 0, 1e-10));
}

at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return torch::zeros(sizes, dtype);
}

WORLD_TEST(RingAttention, MistakesAreNamed, 1) {
  auto group = init_process_group();
  auto error = [](const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value,
                  const RingAttentionOptions& options = {}) {
    return message_of([&] { ring_attention(query, key, value, options); });
  };
  auto good = zeros({1, 4, 6, 8});
  EXPECT_EQ(error(good, good, {}),
            "ring_attention: query, key and value must be [batch, heads, "
            "tokens, head_dim], got an undefined tensor");
  EXPECT_EQ(error(zeros({4, 6, 8}), good, good),
            "ring_attention: query, key and value must be [batch, heads, "
            "tokens, head_dim], got 3 dimensions");
  EXPECT_EQ(error(good, good, zeros({1, 4, 5, 8})),
            "ring_attention: key and value must have one shape, got query [1, "
            "4, 6, 8], key [1, 4, 6, 8], value [1, 4, 5, 8]");
  EXPECT_THAT(error(good, zeros({1, 4, 6, 4}), zeros({1, 4, 6, 4})),
              HasSubstr("query and key must have one batch size and head_dim"));
  EXPECT_THAT(error(good, zeros({1, 3, 6, 8}), zeros({1, 3, 6, 8})),
              HasSubstr("the number of heads must be a multiple of the number "
                        "of key heads"));
  EXPECT_THAT(error(good, zeros({1, 0, 6, 8}), zeros({1, 0, 6, 8})),
              HasSubstr("must be a multiple of the number of key heads"));
  auto wide = zeros({1, 4, 6, 8}, at::kDouble);
  EXPECT_EQ(error(good, wide, wide),
            "ring_attention: query, key and value must have one dtype and "
            "device, got Float on cpu and Double on cpu");
  auto whole_numbers = zeros({1, 4, 6, 8}, at::kLong);
  EXPECT_EQ(error(whole_numbers, whole_numbers, whole_numbers),
            "ring_attention: got Long tensors; allowed are Double, Float, "
            "BFloat16 and Half");
  auto more = zeros({1, 4, 7, 8});
  EXPECT_EQ(error(good, more, more, {.is_causal = true}),
            "ring_attention: with is_causal this rank's queries and keys must "
            "be of the same tokens, got query [1, 4, 6, 8], key [1, 4, 7, 8], "
            "value [1, 4, 7, 8]");
  EXPECT_EQ(error(good, good, good, {.scale = 0}),
            "ring_attention: scale is 0; give a finite number above 0, or "
            "none");
  EXPECT_EQ(error(good, good, good, {.dropout_p = 0.1}),
            "ring_attention: dropout_p is 0.1, but there is no dropout of "
            "attention here; it must be 0: drop out the result instead");
}

WORLD_TEST(RingAttention, RanksThatDisagreeAreTold, 2) {
  auto group = init_process_group();
  const bool first = world.rank == 0;
  auto good = zeros({1, 4, 6, 8});
  auto error = [](const at::Tensor& tensor,
                  const RingAttentionOptions& options = {}) {
    return message_of([&] { ring_attention(tensor, tensor, tensor, options); });
  };
  EXPECT_EQ(error(zeros({first ? 1 : 2, 4, 6, 8})),
            "ring_attention: the ranks of the group differ in the batch size: "
            "1 on rank 0, 2 on rank 1; it must be the same on all");
  EXPECT_THAT(error(zeros({1, first ? 4 : 2, 6, 8})),
              HasSubstr("the number of heads: 4 on rank 0, 2 on rank 1"));
  EXPECT_THAT(error(zeros({1, 4, 6, 8}, first ? at::kFloat : at::kDouble)),
              HasSubstr("the dtype: Float on rank 0, Double on rank 1"));
  EXPECT_THAT(error(good, {.is_causal = first}),
              HasSubstr("is_causal: true on rank 0, false on rank 1"));
  EXPECT_THAT(error(good, {.order = first ? ContextOrder::zigzag
                                          : ContextOrder::plain}),
              HasSubstr("order: zigzag on rank 0, plain on rank 1"));
  RingAttentionOptions options;
  if (first) options.scale = 0.5;
  EXPECT_THAT(error(good, options),
              HasSubstr("scale: 0.5 on rank 0, none on rank 1"));
  EXPECT_THAT(error(zeros({1, 4, 6, 8}).requires_grad_(first)),
              HasSubstr("whether an input requires grad: true on rank 0, "
                        "false on rank 1"));
  EXPECT_EQ(error(zeros({1, 4, first ? 5 : 2, 8}),
                  {.is_causal = true, .order = ContextOrder::zigzag}),
            "ring_attention: rank 0 of the group has 5 of 7 tokens, but in "
            "zigzag order it must have 3; cut sequences with "
            "context_shard(), or use the plain order");
}

// The elements of all messages that this rank has sent.
uint64_t elements_sent() {
  const auto& flight = *inside(default_group()).flight();
  uint64_t elements = 0;
  for (uint64_t id = 1; id <= flight.last_id(); ++id) {
    FlightRecord record;
    EXPECT_TRUE(flight.read(id, record));
    if (std::string(record.call.operation) == "isend") {
      elements += record.call.in_elements;
    }
  }
  return elements;
}

// docs/context-parallel.md gives these numbers.
WORLD_TEST(RingAttention, SendsNoBlockToARankThatDoesNotNeedIt, 3) {
  auto group = init_process_group();
  constexpr uint64_t kBlock = 2 * 2 * 6 * 8;  // key and value
  auto query = torch::randn({1, 4, 6, 8}).requires_grad_();
  auto key = torch::randn({1, 2, 6, 8}).requires_grad_();
  uint64_t before = 0;
  auto sent = [&] {
    const auto now = elements_sent();
    return now - std::exchange(before, now);
  };
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    for (bool is_causal : {false, true}) {
      auto output = ring_attention(query, key, key,
                                   {.is_causal = is_causal, .order = order});
      const bool half = is_causal && order == ContextOrder::plain;
      // Rank r passes on the blocks of ranks 0 to r, unless it is the last.
      const auto rank = static_cast<uint64_t>(world.rank);
      const uint64_t passed = half ? (rank == 2 ? 0 : rank + 1) : 2;
      EXPECT_EQ(sent(), passed * kBlock);
      output.sum().backward();
      // And again, with the sums of gradients; the last rank sends these home.
      const uint64_t home = half ? (rank == 2 ? 2 : 0) : 1;
      EXPECT_EQ(sent(), (2 * passed + home) * kBlock);
    }
  }
}

// Rank 1 never makes its backward.
WORLD_TEST(RingAttention, ARankThatDoesNotComeIsNamed, 2) {
  auto group = init_process_group();
  auto query = zeros({1, 4, 600, 8}).requires_grad_();
  auto output = ring_attention(query, query, query,
                               {.timeout = std::chrono::milliseconds(100)});
  if (world.rank == 0) {
    EXPECT_THAT(message_of([&] { output.sum().backward(); }),
                HasSubstr("rank 1"));
  }
  barrier();
}

WORLD_TEST(RingAttention, HasNoSecondDerivative, 2) {
  auto group = init_process_group();
  auto query = zeros({1, 4, 6, 8}).requires_grad_();
  auto output = ring_attention(query, query, query);
  EXPECT_THAT(message_of([&] {
                torch::autograd::grad({output.sum()}, {query}, {}, true, true);
              }),
              HasSubstr("ring_attention has no second derivative; call "
                        "backward() without create_graph"));
}

}  // namespace
}  // namespace lockstep::internal
