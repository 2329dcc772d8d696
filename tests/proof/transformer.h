#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/model_parallel.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/fsdp/fully_shard.h"

// A tiny transformer whose layers are whole, or divided over the ranks of any
// axes of a mesh. Layers in groups of one rank are LibTorch's own.
namespace lockstep::internal::testing {

inline constexpr int64_t kVocabulary = 32;
inline constexpr int64_t kFeatures = 32;
inline constexpr int64_t kHidden = 64;
inline constexpr int64_t kHeads = 8;

// How the model is divided; equal on all ranks.
struct Division {
  // The ranks that divide the weights of layers.
  ProcessGroupPtr tensor{};
  // Whether they divide the sequence between these layers, too.
  bool sequence_parallel{false};

  // The ranks that divide the sequence.
  ProcessGroupPtr context{};
  ContextOrder order{ContextOrder::zigzag};
  bool exchange_heads{false};  // ulysses_attention() instead of a ring

  bool is_causal{true};
  int64_t length{0};  // tokens of a whole sequence
  // The dtype of all parameters, whose first values are drawn in float32 and
  // then converted.
  at::ScalarType dtype{at::kDouble};

  // Whether blocks are computed again in backward.
  bool checkpoint{false};
  // Whether blocks are units of FullyShard.
  std::optional<FullyShardOptions> shard{};
};

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const Division& division) : d(division) {
    // forward() passes the input on once for three layers.
    const nn::ColumnParallelLinearOptions column{
        .group = d.tensor, .bias = false, .reduce_input_gradient = false};
    const auto layer = [&](const char* name) {
      return register_module(
          name, nn::ColumnParallelLinear(kFeatures, kFeatures, column));
    };
    query = layer("query");
    key = layer("key");
    value = layer("value");
    projection = register_module(
        "projection",
        nn::RowParallelLinear(
            kFeatures, kFeatures,
            {.group = d.tensor, .sequence_parallel = d.sequence_parallel}));
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor input = d.sequence_parallel
                                 ? all_gather_sequence(x, 1, d.tensor)
                                 : copy_to_tensor_group(x, d.tensor);
    const auto heads = [&](nn::ColumnParallelLinear& layer) {
      return layer(input)
          .unflatten(-1, {-1, kFeatures / kHeads})
          .transpose(1, 2);
    };
    const auto mixed = attend(heads(query), heads(key), heads(value));
    return projection(mixed.transpose(1, 2).flatten(2));
  }

  at::Tensor attend(const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v) const {
    if (d.context->size() == 1) {
      return at::scaled_dot_product_attention(q, k, v, {}, 0, d.is_causal);
    }
    if (d.exchange_heads) {
      return ulysses_attention(
          q, k, v,
          {.group = d.context, .is_causal = d.is_causal, .order = d.order});
    }
    return ring_attention(
        q, k, v,
        {.group = d.context, .is_causal = d.is_causal, .order = d.order});
  }

  Division d;
  nn::ColumnParallelLinear query{nullptr}, key{nullptr}, value{nullptr};
  nn::RowParallelLinear projection{nullptr};
};
TORCH_MODULE(Attention);

inline torch::nn::AnyModule make_norm(const Division& d) {
  if (d.sequence_parallel) {
    return torch::nn::AnyModule(
        nn::SequenceParallelLayerNorm(kFeatures, {.group = d.tensor}));
  }
  return torch::nn::AnyModule(
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Division& d)
      : norm1(make_norm(d)), norm2(make_norm(d)) {
    register_module("norm1", norm1.ptr());
    attention = register_module("attention", Attention(d));
    register_module("norm2", norm2.ptr());
    up = register_module("up", nn::ColumnParallelLinear(
                                   kFeatures, kHidden,
                                   {.group = d.tensor,
                                    .sequence_parallel = d.sequence_parallel}));
    down = register_module(
        "down",
        nn::RowParallelLinear(
            kHidden, kFeatures,
            {.group = d.tensor, .sequence_parallel = d.sequence_parallel}));
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention(norm1.forward(x));
    return y + down(torch::gelu(up(norm2.forward(y))));
  }

  torch::nn::AnyModule norm1, norm2;
  Attention attention{nullptr};
  nn::ColumnParallelLinear up{nullptr};
  nn::RowParallelLinear down{nullptr};
};
TORCH_MODULE(Block);

// Which layers of the model a Stage has.
struct Layers {
  bool first{true};      // the embeddings
  int begin{0}, end{0};  // blocks
  bool last{true};       // the last norm and the head
  bool tied{false};      // the head uses the table of the embedding
};

// The whole model, or one stage of a pipeline. Names are those of the whole.
// Layers that a rank may have without others begin with a seed of their own, so
// that all ranks draw the first values of one process.
struct StageImpl : torch::nn::Module {
  StageImpl(const Division& division, const Layers& layers)
      : d(division), has(layers) {
    torch::manual_seed(1);
    if (has.first || (has.last && has.tied)) {
      embedding = register_module(
          "embedding",
          nn::VocabParallelEmbedding(
              kVocabulary, kFeatures,
              {.group = d.tensor, .sequence_parallel = d.sequence_parallel}));
      embedding->to(d.dtype);
    }
    torch::manual_seed(2);
    if (has.first) {
      position = register_module("position",
                                 torch::nn::Embedding(d.length, kFeatures));
      position->to(d.dtype);
      places =
          context_positions(d.length, {.group = d.context, .order = d.order});
    }
    for (int i = has.begin; i < has.end; ++i) add_block(i);
    torch::manual_seed(3);
    if (has.last) {
      norm = make_norm(d);
      register_module("norm", norm.ptr())->to(d.dtype);
    }
    if (has.last && !has.tied) {
      head = register_module(
          "head",
          nn::ColumnParallelLinear(kFeatures, kVocabulary,
                                   {.group = d.tensor,
                                    .bias = false,
                                    .sequence_parallel = d.sequence_parallel}));
      head->to(d.dtype);
    }
  }

  // Tokens [rows, tokens of this rank] if it has the embeddings; returns this
  // rank's part of the logits if it has the head. Otherwise activations.
  at::Tensor forward(at::Tensor x) {
    if (has.first) x = embedding(x) + positions();
    for (const auto& block : blocks) x = block(x);
    if (!has.last) return x;
    x = norm.forward(x);
    if (!has.tied) return head(x);
    x = d.sequence_parallel ? all_gather_sequence(x, 1, d.tensor)
                            : copy_to_tensor_group(x, d.tensor);
    return at::linear(x, embedding->weight);
  }

  at::Tensor positions() {
    const at::Tensor all = position(places);
    return d.sequence_parallel ? scatter_to_tensor_group(all, 0, d.tensor)
                               : all;
  }

  // Makes a block, then what is around it: FullyShard, then checkpoint().
  void add_block(int index) {
    const auto make = [&] {
      torch::manual_seed(10 + index);
      Block block(d);
      block->to(d.dtype);
      return block;
    };
    const std::string name = "block" + std::to_string(index);
    if (d.shard) {
      FullyShard<Block> unit(make, *d.shard);
      register_module(name, unit.ptr());
      add_call(unit);
    } else {
      Block block = make();
      register_module(name, block);
      add_call(block);
    }
  }
  template <typename Callable>
  void add_call(Callable block) {
    blocks.push_back([block, this](const at::Tensor& x) mutable {
      return d.checkpoint ? lockstep::checkpoint(block, x) : block(x);
    });
  }

  Division d;
  Layers has;
  nn::VocabParallelEmbedding embedding{nullptr};
  torch::nn::Embedding position{nullptr};
  at::Tensor places;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> blocks;
  torch::nn::AnyModule norm;
  nn::ColumnParallelLinear head{nullptr};
};
TORCH_MODULE(Stage);

}  // namespace lockstep::internal::testing
