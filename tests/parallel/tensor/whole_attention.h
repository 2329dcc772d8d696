#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace lockstep::internal::testing {

// Attention of one process, whose parameters have the names and the order of
// ParallelSelfAttention's.
struct WholeAttention : torch::nn::Module {
  WholeAttention(int64_t features, int64_t heads, bool is_causal)
      : head_size(features / heads), causal(is_causal) {
    for (auto [name, layer] : {std::pair{"query", &query},
                               {"key", &key},
                               {"value", &value},
                               {"projection", &projection}}) {
      *layer = register_module(name, torch::nn::Linear(features, features));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto heads = [&](torch::nn::Linear& layer) {
      return layer(x).unflatten(-1, {-1, head_size}).transpose(1, 2);
    };
    auto mixed = at::scaled_dot_product_attention(
        heads(query), heads(key), heads(value), mask, 0, causal);
    return projection(mixed.transpose(1, 2).flatten(2));
  }
  int64_t head_size;
  bool causal;
  std::optional<at::Tensor> mask;
  torch::nn::Linear query{nullptr};
  torch::nn::Linear key{nullptr};
  torch::nn::Linear value{nullptr};
  torch::nn::Linear projection{nullptr};
};

}  // namespace lockstep::internal::testing
