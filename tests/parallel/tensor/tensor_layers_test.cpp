// The layers of tensor parallelism, against LibTorch's in one process.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/tensor/whole_attention.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

using testing::expect_close;
using testing::expect_close_parameters;
using testing::message_of;
using testing::whole_of;
using testing::WholeAttention;
using testing::World;

constexpr double kLayerBound = 1e-12;

const auto kValueOf = [](const at::Tensor& parameter) { return parameter; };
const auto kGradientOf = [](const at::Tensor& parameter) {
  return parameter.grad();
};

// Compares outputs and gradients of a divided module and a whole one, which
// have the same parameters, for the input `x` on which every rank has `own(x)`;
// the output is whole after `gathered(output)`.
template <typename Divided, typename Whole, typename Own, typename Gathered>
void expect_same(Divided& divided, Whole& whole, const at::Tensor& x,
                 const Own& own, const Gathered& gathered,
                 double bound = kLayerBound) {
  expect_close_parameters(*divided, *whole, 0, "initial value", kValueOf);
  auto input = x.detach().clone().requires_grad_(x.is_floating_point());
  auto other = x.detach().clone().requires_grad_(x.is_floating_point());
  // Twice, because gradients accumulate.
  for (int pass = 0; pass < 2; ++pass) {
    auto have = gathered(divided->forward(own(input)));
    auto want = whole->forward(other);
    expect_close(have, want, bound, "output");
    auto factor = torch::cos(torch::arange(want.numel()).to(want.dtype()))
                      .view(want.sizes());
    (have * factor).sum().backward();
    (want * factor).sum().backward();
  }
  expect_close_parameters(*divided, *whole, bound, "gradient", kGradientOf);
  if (x.is_floating_point()) {
    expect_close(input.grad(), other.grad(), bound, "gradient of the input");
  }
}

const auto kSame = [](const at::Tensor& tensor) { return tensor; };
// The part of the sequence in dimension 1.
const auto kPart = [](const at::Tensor& tensor) {
  return scatter_to_tensor_group(tensor, 1);
};
const auto kAll = [](const at::Tensor& tensor) {
  return gather_from_tensor_group(tensor, 1);
};

at::Tensor numbers(at::IntArrayRef shape) {
  return torch::randn(shape, at::kDouble);
}

template <typename Holder>
Holder in_double(Holder module) {
  module->to(at::kDouble);
  return module;
}

WORLD_TEST(TensorLayers, ColumnParallel, 1, 2, 3, 4) {
  testing::on_both_backends([&] {
    // 10 and 3 are not multiples of all numbers of ranks.
    for (int64_t features : {12, 10, 3}) {
      for (bool bias : {false, true}) {
        SCOPED_TRACE(c10::str("features ", features, ", bias ", bias));
        torch::manual_seed(1);
        auto whole = in_double(torch::nn::Linear(
            torch::nn::LinearOptions(5, features).bias(bias)));
        torch::manual_seed(1);
        auto divided =
            in_double(nn::ColumnParallelLinear(5, features, {.bias = bias}));
        auto x = numbers({2, 12, 5});
        auto gather = [&](const at::Tensor& part) {
          return gather_from_tensor_group(part, -1, {}, features);
        };
        expect_same(divided, whole, x, kSame, gather);
        nn::ColumnParallelLinear gathering(whole, {.gather_output = true});
        whole->zero_grad();
        expect_same(gathering, whole, x, kSame, kSame);
        nn::ColumnParallelLinear sequence(whole, {.sequence_parallel = true});
        whole->zero_grad();
        expect_same(sequence, whole, x, kPart, gather);
      }
    }
  });
}

WORLD_TEST(TensorLayers, RowParallel, 1, 2, 3, 4) {
  testing::on_both_backends([&] {
    for (int64_t features : {12, 10, 3}) {
      for (bool bias : {false, true}) {
        SCOPED_TRACE(c10::str("features ", features, ", bias ", bias));
        torch::manual_seed(1);
        auto whole = in_double(torch::nn::Linear(
            torch::nn::LinearOptions(features, 5).bias(bias)));
        torch::manual_seed(1);
        auto divided =
            in_double(nn::RowParallelLinear(features, 5, {.bias = bias}));
        auto x = numbers({2, 12, features});
        auto part = [](const at::Tensor& tensor) {
          return scatter_to_tensor_group(tensor, -1);
        };
        expect_same(divided, whole, x, part, kSame);
        nn::RowParallelLinear taking(whole, {.input_is_parallel = false});
        whole->zero_grad();
        expect_same(taking, whole, x, kSame, kSame);
        nn::RowParallelLinear sequence(whole, {.sequence_parallel = true});
        whole->zero_grad();
        expect_same(sequence, whole, x, part, kAll);
      }
    }
  });
}

WORLD_TEST(TensorLayers, Embedding, 1, 2, 3, 4) {
  testing::on_both_backends([&] {
    // Some ranks have none of 2 rows.
    for (int64_t rows : {12, 13, 2}) {
      for (int padding : {-100, -1, 0}) {
        SCOPED_TRACE(c10::str("rows ", rows, ", padding ", padding));
        std::optional<int64_t> padding_idx;
        if (padding != -100) padding_idx = padding;
        torch::manual_seed(1);
        auto whole = in_double(torch::nn::Embedding(
            torch::nn::EmbeddingOptions(rows, 4).padding_idx(padding_idx)));
        torch::manual_seed(1);
        auto divided = in_double(
            nn::VocabParallelEmbedding(rows, 4, {.padding_idx = padding_idx}));
        auto x = torch::arange(24).mul(7).remainder(rows).view({2, 12});
        expect_same(divided, whole, x, kSame, kSame);
        nn::VocabParallelEmbedding sequence(whole, {.sequence_parallel = true});
        whole->zero_grad();
        expect_same(sequence, whole, x, kSame, kAll);
      }
    }
  });
}

WORLD_TEST(TensorLayers, SequenceParallelNorms, 1, 2, 3) {
  testing::on_both_backends([&] {
    for (bool affine : {true, false}) {
      SCOPED_TRACE(affine);
      torch::nn::LayerNorm whole(
          torch::nn::LayerNormOptions({4}).eps(1e-3).elementwise_affine(
              affine));
      if (affine) {
        torch::NoGradGuard no_grad;
        whole->weight.uniform_(0.5, 1.5);
        whole->bias.uniform_(-1, 1);
      }
      in_double(whole);
      nn::SequenceParallelLayerNorm divided(whole,
                                            nn::SequenceParallelNormOptions{});
      auto x = numbers({2, 12, 4});
      expect_same(divided, whole, x, kPart, kAll);
      if (affine) {  // used twice in one graph
        whole->zero_grad();
        divided->zero_grad();
        whole(whole(x)).square().sum().backward();
        kAll(divided(divided(kPart(x)))).square().sum().backward();
        expect_close_parameters(*divided, *whole, kLayerBound, "gradient",
                                kGradientOf);
      }

      nn::SequenceParallelRMSNorm rms(4, {.elementwise_affine = affine});
      in_double(rms);
      auto weight = torch::rand({4}, at::kDouble).requires_grad_();
      std::optional<at::Tensor> own_weight;
      if (affine) {
        torch::NoGradGuard no_grad;
        rms->weight.copy_(weight);
        own_weight = weight;
      }
      auto other = x.detach().clone().requires_grad_();
      auto input = x.detach().clone().requires_grad_();
      auto want = at::rms_norm(other, {4}, own_weight);
      auto have = kAll(rms->forward(kPart(input)));
      expect_close(have, want, kLayerBound, "output of RMSNorm");
      want.square().sum().backward();
      have.square().sum().backward();
      expect_close(input.grad(), other.grad(), kLayerBound,
                   "gradient of the input");
      if (affine) {
        expect_close(rms->weight.grad(), weight.grad(), kLayerBound,
                     "gradient of the weight");
      }
    }
  });
}

WORLD_TEST(TensorLayers, SelfAttention, 1, 2, 3, 4) {
  testing::on_both_backends([&] {
    for (bool sequence : {false, true}) {
      for (bool causal : {false, true}) {
        SCOPED_TRACE(c10::str("sequence ", sequence, ", causal ", causal));
        torch::manual_seed(1);
        auto whole = std::make_shared<WholeAttention>(24, 12, causal);
        torch::manual_seed(1);
        nn::ParallelSelfAttention divided(
            24, 12, {.is_causal = causal, .sequence_parallel = sequence});
        in_double(divided);
        in_double(whole);
        auto x = numbers({2, 12, 24});
        if (sequence) {
          expect_same(divided, whole, x, kPart, kAll);
        } else {
          expect_same(divided, whole, x, kSame, kSame);
        }
        if (causal) continue;
        auto mask = torch::randn({12, 12}, at::kDouble);
        whole->mask = mask;
        auto have = divided->forward(sequence ? kPart(x) : x, mask);
        expect_close(sequence ? kAll(have) : have, whole->forward(x),
                     kLayerBound, "output with a mask");
      }
    }
  });
}

// They have whole parameters then, which would be taken for parts.
WORLD_TEST(TensorLayers, MadeBeforeTheGroupTheyStayWhole, 2) {
  torch::manual_seed(1);
  nn::ColumnParallelLinear column(8, 6);
  nn::RowParallelLinear row(6, 8);
  nn::VocabParallelEmbedding embedding(6, 8);
  nn::SequenceParallelLayerNorm norm(8);
  nn::ParallelSelfAttention attention(8, 2);
  auto run = [&] {
    auto x = norm(attention(embedding(torch::tensor({{0, 3, 5}}))));
    return row(column(x));
  };
  auto want = run();
  auto group = init_process_group();
  EXPECT_TRUE(torch::equal(run(), want));
}

WORLD_TEST(TensorLayers, ASequentialHoldsThem, 2) {
  auto group = init_process_group();
  nn::SequenceParallelLayerNorm norm(8);
  nn::ParallelSelfAttention attention(8, 2, {.sequence_parallel = true});
  nn::ColumnParallelLinear up(8, 12, {.sequence_parallel = true});
  nn::RowParallelLinear down(12, 8, {.sequence_parallel = true});
  torch::nn::Sequential all(norm, attention, up, torch::nn::GELU(), down);
  auto x = torch::randn({2, 3, 8});
  EXPECT_TRUE(
      torch::equal(all->forward(x), down(at::gelu(up(attention(norm(x)))))));
}

// The output features of a packed matrix are not divided by rank but by head.
WORLD_TEST(TensorLayers, PackedAttentionIsDividedByHead, 1, 2, 3) {
  auto group = init_process_group();
  torch::manual_seed(1);
  for (bool bias : {false, true}) {
    torch::nn::Linear packed(torch::nn::LinearOptions(12, 36).bias(bias));
    torch::nn::Linear mixing(torch::nn::LinearOptions(12, 12).bias(bias));
    in_double(packed);
    in_double(mixing);
    auto x = numbers({2, 5, 12});
    auto qkv = packed(x).view({2, 5, 3, 6, 2}).permute({2, 0, 3, 1, 4});
    auto want = mixing(at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
                           .transpose(1, 2)
                           .flatten(2));
    nn::ParallelSelfAttention attention(packed, mixing, 6,
                                        nn::ParallelSelfAttentionOptions{});
    EXPECT_EQ(attention->parameters().size(), bias ? 8U : 4U);
    auto have = attention->forward(x);
    expect_close(have, want, kLayerBound, "output");
    want.square().sum().backward();
    have.square().sum().backward();
    auto& key = attention->key;
    expect_close(whole_of(key->weight.grad(), key->weight),
                 packed->weight.grad().narrow(0, 12, 12), kLayerBound,
                 "gradient of key");
  }
}

WORLD_TEST(TensorLayers, InOneProcessTheyAreLibTorchs, 1) {
  auto group = init_process_group();
  torch::manual_seed(1);
  auto x = torch::randn({2, 6, 8});
  const auto before = inside(group).next_sequence_number();
  torch::nn::Linear linear(8, 6);
  nn::ColumnParallelLinear column(
      linear, {.gather_output = true, .sequence_parallel = true});
  nn::RowParallelLinear row(
      linear, {.input_is_parallel = false, .sequence_parallel = true});
  EXPECT_TRUE(torch::equal(column(x), linear(x)));
  EXPECT_TRUE(torch::equal(row(x), linear(x)));
  EXPECT_EQ(layout_of(column->weight), nullptr);
  torch::nn::LayerNorm plain(torch::nn::LayerNormOptions({8}));
  nn::SequenceParallelLayerNorm norm(plain, nn::SequenceParallelNormOptions{});
  EXPECT_TRUE(torch::equal(norm(x), plain(x)));
  EXPECT_EQ(inside(group).next_sequence_number(), before + 1);
}

// Parameters keep their place in the whole tensor when the module is cast,
// loaded or cloned.
WORLD_TEST(TensorLayers, LayoutsStay, 2, 3) {
  auto group = init_process_group();
  auto expect_layout = [&](const at::Tensor& tensor, const Sizes& shape,
                           size_t dim) {
    const auto* layout = layout_of(tensor);
    ASSERT_NE(layout, nullptr);
    EXPECT_EQ(layout->shape, shape);
    EXPECT_EQ(layout->box, chunk_box(shape, dim, world.rank, world.size));
    EXPECT_FALSE(layout->range);
    EXPECT_EQ(layout->groups, std::vector<ProcessGroupPtr>{group});
  };
  nn::ColumnParallelLinear column(5, 7);
  nn::RowParallelLinear row(7, 5);
  nn::VocabParallelEmbedding embedding(7, 5);
  auto expect_all = [&] {
    expect_layout(column->weight, {7, 5}, 0);
    expect_layout(column->bias, {7}, 0);
    expect_layout(row->weight, {5, 7}, 1);
    EXPECT_EQ(layout_of(row->bias), nullptr);
    expect_layout(embedding->weight, {7, 5}, 0);
  };
  expect_all();
  column->to(at::kDouble);
  row->to(at::kDouble);
  embedding->to(at::kDouble);
  expect_all();
  auto cloned =
      std::dynamic_pointer_cast<nn::ColumnParallelLinearImpl>(column->clone());
  expect_layout(cloned->weight, {7, 5}, 0);
  EXPECT_TRUE(torch::equal(cloned->weight, column->weight));
  nn::ParallelSelfAttention attention(12, 6);
  auto copy = std::dynamic_pointer_cast<nn::ParallelSelfAttentionImpl>(
      attention->clone());
  auto x = torch::randn({1, 3, 12});
  broadcast(x, 0);
  EXPECT_TRUE(torch::equal(copy->forward(x), attention->forward(x)));
}

WORLD_TEST(TensorLayers, SixteenBitTypesAreSummedByTheBackend, 2) {
  testing::on_both_backends([&] {
    torch::nn::Linear whole(8, 5);
    nn::RowParallelLinear row(whole, {.input_is_parallel = false});
    row->to(at::kBFloat16);
    auto x = torch::randn({3, 8});
    auto have = row(x.to(at::kBFloat16));
    EXPECT_EQ(have.scalar_type(), at::kBFloat16);
    expect_close(have.to(at::kFloat), whole(x), 2e-2, "output");
  });
}

WORLD_TEST(TensorLayers, UnderAutocast, 2) {
  auto group = init_process_group();
  torch::manual_seed(1);
  torch::nn::Linear first(8, 12);
  torch::nn::Linear second(12, 8);
  auto x = torch::randn({2, 6, 8});
  auto want = second(at::gelu(first(x)));
  want.square().mean().backward();
  for (bool sequence : {false, true}) {
    nn::ColumnParallelLinear up(first, {.sequence_parallel = sequence});
    nn::RowParallelLinear down(second, {.sequence_parallel = sequence});
    at::Tensor have;
    {
      Autocast autocast(at::kCPU, at::kBFloat16);
      have = down(at::gelu(up(sequence ? kPart(x) : x)));
      EXPECT_EQ(have.scalar_type(), at::kBFloat16);
      if (sequence) have = kAll(have);
    }
    expect_close(have.to(at::kFloat), want, 2e-2, "output");
    have.to(at::kFloat).square().mean().backward();
    for (const auto& [part, whole] : {std::pair{up->weight, first->weight},
                                      {up->bias, first->bias},
                                      {down->weight, second->weight},
                                      {down->bias, second->bias}}) {
      EXPECT_EQ(part.grad().scalar_type(), at::kFloat);
      expect_close(whole_of(part.grad(), part), whole.grad(), 2e-2, "gradient");
    }
  }
}

WORLD_TEST(TensorLayers, MistakesAreNamed, 2) {
  auto group = init_process_group();
  auto x = torch::zeros({2, 3, 8});
  nn::ColumnParallelLinear column(6, 4);
  EXPECT_EQ(message_of([&] { column(x); }),
            "ColumnParallelLinear: the input has the shape [2, 3, 8], but "
            "in_features is 6; its last dimension must have as many");
  nn::RowParallelLinear row(8, 4);
  EXPECT_EQ(
      message_of([&] { row(x); }),
      "RowParallelLinear: the input has the shape [2, 3, 8], but its last "
      "dimension must have 4 of 8 features, as input_is_parallel is true");
  nn::VocabParallelEmbedding embedding(7, 4);
  EXPECT_EQ(message_of([&] { embedding(torch::tensor({0, 7})); }),
            "VocabParallelEmbedding: the input has the index 7, but the table "
            "has 7 rows; allowed are 0 to 6");
  EXPECT_EQ(message_of([&] { embedding(torch::tensor({0, -1})); }),
            "VocabParallelEmbedding: the input has the index -1, but the table "
            "has 7 rows; allowed are 0 to 6");
  EXPECT_EQ(message_of([&] { nn::ParallelSelfAttention(9, 3); }),
            "ParallelSelfAttention: num_heads is 3, but the group has 2 ranks; "
            "each must have the same number of heads");
  EXPECT_EQ(message_of([&] { nn::ParallelSelfAttention(9, 4); }),
            "ParallelSelfAttention: embed_dim is 9 and num_heads 4; embed_dim "
            "must be a multiple of num_heads");
  EXPECT_NE(message_of([&] {
              nn::ColumnParallelLinear(
                  4, 4,
                  {.sequence_parallel = true, .reduce_input_gradient = false});
            }).find("reduce_input_gradient is false with sequence_parallel"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              nn::VocabParallelEmbedding(
                  torch::nn::Embedding(
                      torch::nn::EmbeddingOptions(4, 4).sparse(true)),
                  nn::VocabParallelEmbeddingOptions{});
            }).find("max_norm, scale_grad_by_freq or sparse"),
            std::string::npos);
}

WORLD_TEST(TensorLayers, SayWhatTheyAre, 2) {
  auto group = init_process_group();
  auto text = [](const torch::nn::Module& module) {
    std::ostringstream stream;
    module.pretty_print(stream);
    return stream.str();
  };
  EXPECT_EQ(text(*nn::ColumnParallelLinear(4, 6)),
            "lockstep::nn::ColumnParallelLinear(in_features=4, out_features=3 "
            "of 6, bias=true)");
  EXPECT_EQ(text(*nn::RowParallelLinear(6, 4)),
            "lockstep::nn::RowParallelLinear(in_features=3 of 6, "
            "out_features=4, bias=true)");
  EXPECT_EQ(text(*nn::VocabParallelEmbedding(6, 4)),
            "lockstep::nn::VocabParallelEmbedding(num_embeddings=3 of 6, "
            "embedding_dim=4)");
  EXPECT_EQ(text(*nn::SequenceParallelLayerNorm(4)),
            "lockstep::nn::SequenceParallelLayerNorm([4], eps=None, "
            "elementwise_affine=true)");
  EXPECT_EQ(text(*nn::ParallelSelfAttention(4, 2)),
            "lockstep::nn::ParallelSelfAttention(embed_dim=4, num_heads=2, "
            "is_causal=false)");
}

}  // namespace
}  // namespace lockstep::internal
