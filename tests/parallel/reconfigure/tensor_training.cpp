#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/context_shard.h"
#include "lockstep/parallel/context/ring_attention.h"
#include "lockstep/parallel/context/ulysses_attention.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/tensor/parallel_linear.h"
#include "lockstep/parallel/tensor/parallel_self_attention.h"
#include "lockstep/parallel/tensor/sequence_parallel_norm.h"
#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/vocab_parallel_cross_entropy.h"
#include "lockstep/parallel/tensor/vocab_parallel_embedding.h"
#include "tests/parallel/reconfigure/training.h"

namespace lockstep::internal::testing {
namespace {

constexpr int64_t kVocabulary = 29;
constexpr int64_t kFeatures = 24;
constexpr int64_t kHeads = 12;
constexpr int64_t kLength = 12;
constexpr int64_t kRows = 4;

at::Tensor tokens_of(int step) {
  torch::manual_seed(1000 + step);
  return torch::randint(kVocabulary, {kRows, kLength + 1});
}

// A transformer whose layers are divided over the ranks.
struct DividedModelImpl : torch::nn::Module {
  explicit DividedModelImpl(bool sequence)
      : embedding(register_module(
            "embedding",
            nn::VocabParallelEmbedding(kVocabulary, kFeatures,
                                       {.sequence_parallel = sequence}))),
        norm(register_module("norm", nn::SequenceParallelLayerNorm(kFeatures))),
        attention(register_module(
            "attention",
            nn::ParallelSelfAttention(
                kFeatures, kHeads,
                {.is_causal = true, .sequence_parallel = sequence}))),
        up(register_module(
            "up", nn::ColumnParallelLinear(kFeatures, 50,
                                           {.sequence_parallel = sequence}))),
        down(register_module(
            "down", nn::RowParallelLinear(50, kFeatures,
                                          {.sequence_parallel = sequence}))),
        head(register_module(
            "head", nn::ColumnParallelLinear(
                        kFeatures, kVocabulary,
                        {.bias = false, .sequence_parallel = sequence}))),
        is_sequence(sequence) {}

  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target) {
    auto x = embedding(tokens);
    if (is_sequence) x = norm(x);
    x = reaching(x + attention(x));
    x = x + down(at::gelu(up(x)));
    return nn::vocab_parallel_cross_entropy(head(x), target);
  }

  nn::VocabParallelEmbedding embedding;
  nn::SequenceParallelLayerNorm norm;
  nn::ParallelSelfAttention attention;
  nn::ColumnParallelLinear up;
  nn::RowParallelLinear down;
  nn::ColumnParallelLinear head;
  bool is_sequence;
};
TORCH_MODULE(DividedModel);

// A layer of attention over sequences of which each rank has a part.
struct ContextModelImpl : torch::nn::Module {
  explicit ContextModelImpl(bool rings) : is_ring(rings) {}

  at::Tensor forward(const at::Tensor& tokens) {
    const auto x = symbols(tokens);
    const auto parts =
        project(x)
            .view({x.size(0), x.size(1), 3, kHeads, kFeatures / kHeads})
            .permute({2, 0, 3, 1, 4})
            .unbind(0);
    const auto attended =
        is_ring
            ? ring_attention(parts[0], parts[1], parts[2], {.is_causal = true})
            : ulysses_attention(parts[0], parts[1], parts[2],
                                {.is_causal = true});
    const auto hidden = x + attended.transpose(1, 2).reshape(x.sizes());
    return head(reaching(hidden));
  }

  torch::nn::Embedding symbols =
      register_module("symbols", torch::nn::Embedding(kVocabulary, kFeatures));
  torch::nn::Linear project =
      register_module("project", torch::nn::Linear(kFeatures, 3 * kFeatures));
  torch::nn::Linear head =
      register_module("head", torch::nn::Linear(kFeatures, kVocabulary));
  bool is_ring;
};
TORCH_MODULE(ContextModel);

std::unique_ptr<torch::optim::Optimizer> momentum_over(
    const torch::nn::Module& module) {
  return std::make_unique<torch::optim::SGD>(
      module.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

class TensorTraining final : public Training {
 public:
  explicit TensorTraining(bool sequence) {
    torch::manual_seed(21);
    model_ = DividedModel(sequence);
    optimizer_ = momentum_over(*model_);
  }
  void compute(int step) override {
    const auto tokens = tokens_of(step);
    model_->forward(tokens.narrow(1, 0, kLength), tokens.narrow(1, 1, kLength))
        .backward();
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<at::Tensor> parameters() const override {
    return model_->parameters();
  }

 private:
  DividedModel model_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class ContextTraining final : public Training {
 public:
  explicit ContextTraining(bool rings) {
    torch::manual_seed(22);
    model_ = ContextModel(rings);
    wrapper_.emplace(model_);
    optimizer_ = momentum_over(*model_);
  }
  void compute(int step) override {
    const auto tokens = tokens_of(step);
    const auto input = context_shard(tokens.narrow(1, 0, kLength), 1);
    const auto target = context_shard(tokens.narrow(1, 1, kLength), 1);
    at::cross_entropy_loss((*wrapper_)->forward(input).flatten(0, 1),
                           target.flatten())
        .backward();
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<at::Tensor> parameters() const override {
    return model_->parameters();
  }

 private:
  ContextModel model_{nullptr};
  std::optional<DistributedDataParallel<ContextModel>> wrapper_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

// `rest` is "layers" or "sequence" (parallel), "ring" or "ulysses".
MakeTraining tensor_training(const std::string& rest) {
  const bool is_context = rest == "ring" || rest == "ulysses";
  return [rest, is_context]() -> std::unique_ptr<Training> {
    if (is_context) return std::make_unique<ContextTraining>(rest == "ring");
    return std::make_unique<TensorTraining>(rest == "sequence");
  };
}

}  // namespace lockstep::internal::testing
