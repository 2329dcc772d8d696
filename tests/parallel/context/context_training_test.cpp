// A transformer whose ranks have parts of the sequences trains like one process
// with whole sequences.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/ring_attention.h"
#include "lockstep/parallel/context/ulysses_attention.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/context/whole_sequences.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kBatch = 4;
constexpr int64_t kWidth = 12;
constexpr int64_t kHeads = 6;
constexpr int64_t kSymbols = 7;
constexpr int64_t kMostTokens = 32;
constexpr int kSteps = 20;
constexpr double kTrainedBound = 1e-10;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(testing::Attention attention)
      : attention_(std::move(attention)) {}

  at::Tensor forward(const at::Tensor& input) {
    auto packed =
        project(norm(input))
            .view({input.size(0), input.size(1), 3, kHeads, kWidth / kHeads});
    auto parts = packed.permute({2, 0, 3, 1, 4}).unbind(0);
    auto attended = attention_(parts[0], parts[1], parts[2]);
    auto hidden =
        input + combine(attended.transpose(1, 2).reshape(input.sizes()));
    return hidden + second(torch::gelu(first(hidden)));
  }

  torch::nn::LayerNorm norm = register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear project =
      register_module("project", torch::nn::Linear(kWidth, 3 * kWidth));
  torch::nn::Linear combine =
      register_module("combine", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear first =
      register_module("first", torch::nn::Linear(kWidth, 2 * kWidth));
  torch::nn::Linear second =
      register_module("second", torch::nn::Linear(2 * kWidth, kWidth));

 private:
  testing::Attention attention_;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const testing::Attention& attention)
      : blocks(register_module(
            "blocks",
            torch::nn::Sequential(Block(attention), Block(attention)))) {
    to(at::kDouble);
  }

  at::Tensor forward(const at::Tensor& symbols, const at::Tensor& positions) {
    return head(blocks->forward(symbol(symbols) + position(positions)));
  }

  torch::nn::Embedding symbol =
      register_module("symbol", torch::nn::Embedding(kSymbols, kWidth));
  torch::nn::Embedding position =
      register_module("position", torch::nn::Embedding(kMostTokens, kWidth));
  torch::nn::Sequential blocks;
  torch::nn::Linear head =
      register_module("head", torch::nn::Linear(kWidth, kSymbols));
};
TORCH_MODULE(Transformer);

Transformer make_transformer(const testing::Attention& attention) {
  torch::manual_seed(1);
  return Transformer(attention);
}

// The part of the batch and of the sequences that a rank has.
struct Part {
  std::function<at::Tensor(const at::Tensor& symbols)> of;  // [batch, tokens]
  at::Tensor positions;
  int ranks = 1;  // over which gradients are averaged
};

template <typename Forward>
std::vector<double> train(Forward&& forward, Transformer& net, int64_t tokens,
                          const Part& part) {
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(0.03).momentum(0.9));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    torch::manual_seed(1000 + step);
    // Each symbol follows from the one before it.
    auto symbols = (torch::randint(kSymbols, {kBatch, 1}, at::kLong) +
                    torch::arange(tokens + 1)) %
                   kSymbols;
    // Targets are shifted before anything is cut.
    auto inputs = part.of(symbols.narrow(1, 0, tokens));
    auto targets = part.of(symbols.narrow(1, 1, tokens));
    optimizer.zero_grad();
    auto logits = forward(inputs, part.positions);
    auto sum = torch::cross_entropy_loss(
        logits.flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum);
    // The mean over all tokens; DDP divides by the number of ranks.
    auto loss = sum / static_cast<double>(kBatch * tokens);
    (loss * part.ranks).backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

void expect_same_training(const testing::Attention& attention, int64_t tokens,
                          const ProcessGroupPtr& context, ContextOrder order,
                          int data_ranks = 1) {
  auto single =
      make_transformer([](const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value) {
        return at::scaled_dot_product_attention(query, key, value, {}, 0, true);
      });
  const auto want = train(
      [&](const at::Tensor& symbols, const at::Tensor& positions) {
        return single->forward(symbols, positions);
      },
      single, tokens,
      {[](const at::Tensor& symbols) { return symbols; },
       torch::arange(tokens)});

  auto net = make_transformer(attention);
  DistributedDataParallel<Transformer> model(net);
  const int64_t rows = kBatch / data_ranks;
  const int64_t begin = get_rank() / context->size() * rows;
  const auto have = train(
      [&](const at::Tensor& symbols, const at::Tensor& positions) {
        return model(symbols, positions);
      },
      net, tokens,
      {[&](const at::Tensor& symbols) {
         return context_shard(symbols.narrow(0, begin, rows), 1,
                              {.group = context, .order = order});
       },
       context_positions(tokens, {.group = context, .order = order}),
       get_world_size()});

  auto losses = torch::tensor(have, at::kDouble);
  all_reduce(losses);
  EXPECT_TRUE(
      losses.allclose(torch::tensor(want, at::kDouble), 0, kTrainedBound));
  EXPECT_LT(want.back(), want.front());
  for (const auto& item : single->named_parameters()) {
    auto error = (net->named_parameters()[item.key()] - item.value())
                     .abs()
                     .max()
                     .item<double>();
    EXPECT_LE(error, kTrainedBound) << item.key();
  }
}

testing::Attention ring_in(const ProcessGroupPtr& group, ContextOrder order) {
  return [=](const at::Tensor& query, const at::Tensor& key,
             const at::Tensor& value) {
    return ring_attention(query, key, value,
                          {.group = group, .is_causal = true, .order = order});
  };
}

testing::Attention heads_in(const ProcessGroupPtr& group, ContextOrder order) {
  return [=](const at::Tensor& query, const at::Tensor& key,
             const at::Tensor& value) {
    return ulysses_attention(
        query, key, value, {.group = group, .is_causal = true, .order = order});
  };
}

WORLD_TEST(ContextTraining, WithARingEqualsOneProcess, 1, 2, 3) {
  auto group = init_process_group();
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    expect_same_training(ring_in(default_group(), order), 12, default_group(),
                         order);
  }
}

// The last rank has fewer tokens than the others, or none.
WORLD_TEST(ContextTraining, WithUnevenLengthsEqualsOneProcess, 2, 3) {
  auto group = init_process_group();
  for (auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    for (int64_t tokens : {11, world.size - 1}) {
      expect_same_training(ring_in(default_group(), order), tokens,
                           default_group(), order);
    }
  }
}

WORLD_TEST(ContextTraining, WithExchangedHeadsEqualsOneProcess, 2, 3) {
  auto group = init_process_group();
  expect_same_training(heads_in(default_group(), ContextOrder::zigzag), 11,
                       default_group(), ContextOrder::zigzag);
}

// Gradients are averaged over data and context, by one group of all ranks.
WORLD_TEST(ContextTraining, WithDataParallelEqualsOneProcess, 4) {
  auto group = init_process_group();
  const auto order = ContextOrder::zigzag;
  auto context = new_subgroups(2);
  expect_same_training(ring_in(context, order), 11, context, order,
                       /*data_ranks=*/2);
}

// The gradients are averaged by collectives of the group whose messages, or
// whose exchanges, are those of attention.
WORLD_TEST(ContextTraining, OverGlooEqualsOneProcess, 2) {
  auto group = init_process_group("gloo");
  const auto order = ContextOrder::zigzag;
  expect_same_training(ring_in(default_group(), order), 11, default_group(),
                       order);
  expect_same_training(heads_in(default_group(), order), 11, default_group(),
                       order);
}

}  // namespace
}  // namespace lockstep::internal
