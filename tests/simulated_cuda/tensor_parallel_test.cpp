// A transformer whose layers or sequences are divided over GPUs has the numbers
// of the CPU; random numbers differ where the activations are divided.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/context/context_shard.h"
#include "lockstep/parallel/context/ring_attention.h"
#include "lockstep/parallel/context/ulysses_attention.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kDividedSteps = 3;
constexpr int64_t kVocabulary = 29;
constexpr int64_t kFeatures = 12;
constexpr int64_t kHidden = 25;
constexpr int64_t kHeads = 6;
constexpr int64_t kLength = 6;

struct DividedTransformer : torch::nn::Module {
  explicit DividedTransformer(bool sequence)
      : embedding(kVocabulary, kFeatures, {.sequence_parallel = sequence}),
        norm(kFeatures),
        attention(kFeatures, kHeads,
                  {.is_causal = true, .sequence_parallel = sequence}),
        up(kFeatures, kHidden, {.sequence_parallel = sequence}),
        down(kHidden, kFeatures, {.sequence_parallel = sequence}),
        head(kFeatures, kVocabulary, {.sequence_parallel = sequence}) {
    register_module("embedding", embedding);
    if (sequence) register_module("norm", norm);
    register_module("attention", attention);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
    normalizes = sequence;
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target) {
    auto x = embedding(tokens);
    if (normalizes) x = norm(x);
    x = x + attention(x);
    x = x + down(at::gelu(up(x)));
    return nn::vocab_parallel_cross_entropy(head(x), target,
                                            {.label_smoothing = 0.1});
  }
  nn::VocabParallelEmbedding embedding;
  nn::SequenceParallelLayerNorm norm;
  nn::ParallelSelfAttention attention;
  nn::ColumnParallelLinear up;
  nn::RowParallelLinear down;
  nn::ColumnParallelLinear head;
  bool normalizes = false;
};

WORLD_TEST(SimgpuTensorParallel, TrainsAsOnTheCpu, 2, 3) {
  for (const bool sequence : {false, true}) {
    expect_as_on_cpu(
        [&](const at::Device& device) {
          torch::manual_seed(3);
          auto model = std::make_shared<DividedTransformer>(sequence);
          model->to(device, at::kDouble);
          torch::optim::SGD optimizer(model->parameters(), 0.1);
          std::vector<at::Tensor> results;
          for (int step = 0; step < kDividedSteps; ++step) {
            torch::manual_seed(static_cast<uint64_t>(50 + step));
            const auto tokens =
                torch::randint(kVocabulary, {2, kLength + 1}).to(device);
            optimizer.zero_grad();
            auto loss = model->forward(tokens.narrow(1, 0, kLength),
                                       tokens.narrow(1, 1, kLength));
            loss.backward();
            optimizer.step();
            results.push_back(loss.detach());
          }
          for (auto& value : values_of(model->parameters())) {
            results.push_back(std::move(value));
          }
          return results;
        },
        1e-12);
  }
}

// On a GPU an index that no rank has was taken for one of another rank's: its
// row was 0, and no target had its loss.
WORLD_TEST(SimgpuTensorParallel, IndicesThatNoRankHasAreErrors, 2) {
  with_delays([&](const at::Device& device) {
    nn::VocabParallelEmbedding embedding(kVocabulary, kFeatures);
    embedding->to(device);
    for (const int64_t index : {int64_t{-1}, kVocabulary}) {
      const auto wrong = torch::full({3}, index, torch::kLong).to(device);
      if (world.rank == 0) {
        EXPECT_ANY_THROW(embedding(wrong).sum().item());
      } else {
        try {
          embedding(wrong).sum().item();
        } catch (const std::exception&) {
        }
      }
      const auto logits = torch::randn({3, 15 - world.rank}).to(device);
      EXPECT_THAT(
          message_of([&] { nn::vocab_parallel_cross_entropy(logits, wrong); }),
          ::testing::HasSubstr("target has the class"));
    }
  });
}

// Masks of a GPU were the same on all ranks inside, too, because only the CPU's
// generator was seeded by rank.
WORLD_TEST(SimgpuTensorParallel, MasksOfGpusDifferOnlyInside, 2, 3) {
  with_delays([&](const at::Device& device) {
    const auto mask = [&] {
      return at::dropout(torch::ones({64}, device), 0.5, true);
    };
    const auto is_equal_on_all_ranks = [&](const at::Tensor& own) {
      auto all = torch::empty({world.size, own.size(0)}, device);
      all_gather_into_tensor(all, own);
      return torch::equal(all, own.expand_as(all));
    };
    torch::manual_seed(5);
    const auto before = mask();
    EXPECT_TRUE(is_equal_on_all_ranks(before));
    at::Tensor inside;
    {
      TensorParallelRandom random;
      inside = mask();
      EXPECT_FALSE(is_equal_on_all_ranks(inside));
    }
    {
      TensorParallelRandom random;
      EXPECT_FALSE(torch::equal(mask(), inside));  // another draw
    }
    const auto after = mask();
    EXPECT_TRUE(is_equal_on_all_ranks(after));
    EXPECT_FALSE(torch::equal(after, before));

    // A recomputation draws the same.
    const auto x = torch::ones({64}, device).requires_grad_();
    const auto dropped = [](const at::Tensor& in) {
      TensorParallelRandom random;
      return at::dropout(in * in, 0.5, true).exp();
    };
    std::vector<at::Tensor> gradients;
    for (const bool again : {false, true}) {
      torch::manual_seed(6);
      auto y = again ? checkpoint(dropped, x) : dropped(x);
      gradients.push_back(torch::autograd::grad({y.sum()}, {x})[0]);
    }
    EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
    EXPECT_FALSE(is_equal_on_all_ranks(gradients[0]));
  });
}

using Attention = std::function<at::Tensor(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value)>;

void expect_attention_as_on_cpu(const Attention& attention,
                                ContextOrder order) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        std::vector<at::Tensor> inputs;
        torch::manual_seed(9);
        for (int i = 0; i < 3; ++i) {
          inputs.push_back(
              context_shard(torch::randn({2, 6, 12, 4}, torch::kDouble), 2,
                            {.order = order})
                  .to(device)
                  .requires_grad_());
        }
        auto output = attention(inputs[0], inputs[1], inputs[2]);
        (output * output).sum().backward();
        auto results = values_of(inputs);
        results.push_back(output.detach());
        return results;
      },
      1e-12);
}

WORLD_TEST(SimgpuContextParallel, UlyssesIsAsOnTheCpu, 2, 3) {
  expect_attention_as_on_cpu(
      [](const auto& query, const auto& key, const auto& value) {
        return ulysses_attention(query, key, value, {.is_causal = true});
      },
      ContextOrder::plain);
}

// On the CPU the messages go by tags, and the kernel is another one.
WORLD_TEST(SimgpuContextParallel, RingIsAsOnTheCpu, 2, 3, 4) {
  for (const auto order : {ContextOrder::plain, ContextOrder::zigzag}) {
    for (const bool causal : {false, true}) {
      expect_attention_as_on_cpu(
          [&](const auto& query, const auto& key, const auto& value) {
            return ring_attention(query, key.narrow(1, 0, 3),
                                  value.narrow(1, 0, 3),
                                  {.is_causal = causal, .order = order});
          },
          order);
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
