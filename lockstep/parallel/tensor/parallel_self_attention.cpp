#include "lockstep/parallel/tensor/parallel_self_attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <sstream>
#include <stdexcept>

#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::nn {
namespace {

// Returns the `index`-th of the three parts of a packed parameter.
at::Tensor unpacked(const at::Tensor& packed, int64_t index) {
  if (!packed.defined()) return packed;
  const int64_t size = packed.size(0) / 3;
  return packed.detach()
      .narrow(0, index * size, size)
      .set_requires_grad(packed.requires_grad());
}

}  // namespace

ParallelSelfAttentionImpl::ParallelSelfAttentionImpl(
    int64_t features, int64_t heads, const ParallelSelfAttentionOptions& given)
    : options(given), embed_dim(features), num_heads(heads) {
  check_arguments();
  ParallelSelfAttentionImpl::reset();
}

ParallelSelfAttentionImpl::ParallelSelfAttentionImpl(
    const torch::nn::Linear& packed, const torch::nn::Linear& mixing,
    int64_t heads, const ParallelSelfAttentionOptions& given)
    : options(given),
      embed_dim(packed->options.in_features()),
      num_heads(heads) {
  check_arguments();
  const bool bias = packed->bias.defined();
  if (packed->options.out_features() != 3 * embed_dim ||
      mixing->options.in_features() != embed_dim ||
      mixing->options.out_features() != embed_dim ||
      mixing->bias.defined() != bias) {
    throw std::invalid_argument(c10::str(
        "ParallelSelfAttention: got layers with weights of shapes ",
        packed->weight.sizes(), " and ", mixing->weight.sizes(),
        "; give one with weight [3 * embed_dim, embed_dim] and one with "
        "[embed_dim, embed_dim], both with a bias or both without"));
  }
  options.bias = bias;
  auto take = [&](int64_t index) {
    return ColumnParallelLinear(unpacked(packed->weight, index),
                                unpacked(packed->bias, index),
                                column_options());
  };
  query = take(0);
  key = take(1);
  value = take(2);
  projection = RowParallelLinear(mixing, row_options());
  register_layers();
}

void ParallelSelfAttentionImpl::check_arguments() const {
  auto group = internal::tensor_group(options.group);
  const int64_t ranks = group ? group->size() : 1;
  if (num_heads < 1 || embed_dim % num_heads != 0) {
    throw std::invalid_argument(c10::str(
        "ParallelSelfAttention: embed_dim is ", embed_dim, " and num_heads ",
        num_heads, "; embed_dim must be a multiple of num_heads"));
  }
  if (num_heads % ranks != 0) {
    throw std::invalid_argument(
        c10::str("ParallelSelfAttention: num_heads is ", num_heads,
                 ", but the group has ", ranks,
                 " ranks; each must have the same number of heads"));
  }
  if (!(options.dropout >= 0 && options.dropout <= 1)) {
    throw std::invalid_argument(c10::str("ParallelSelfAttention: dropout is ",
                                         options.dropout,
                                         "; allowed are 0 to 1"));
  }
}

ColumnParallelLinearOptions ParallelSelfAttentionImpl::column_options() const {
  return {.group = options.group,
          .bias = options.bias,
          .reduce_input_gradient = false};
}

RowParallelLinearOptions ParallelSelfAttentionImpl::row_options() const {
  return {.group = options.group,
          .bias = options.bias,
          .sequence_parallel = options.sequence_parallel};
}

void ParallelSelfAttentionImpl::reset() {
  query = ColumnParallelLinear(embed_dim, embed_dim, column_options());
  key = ColumnParallelLinear(embed_dim, embed_dim, column_options());
  value = ColumnParallelLinear(embed_dim, embed_dim, column_options());
  projection = RowParallelLinear(embed_dim, embed_dim, row_options());
  register_layers();
}

void ParallelSelfAttentionImpl::register_layers() {
  group_ = internal::tensor_group(options.group);
  register_module("query", query);
  register_module("key", key);
  register_module("value", value);
  register_module("projection", projection);
}

void ParallelSelfAttentionImpl::pretty_print(std::ostream& stream) const {
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << std::boolalpha
       << "lockstep::nn::ParallelSelfAttention(embed_dim=" << embed_dim
       << ", num_heads=" << num_heads << ", is_causal=" << options.is_causal
       << ')';
  stream << text.str();
}

at::Tensor ParallelSelfAttentionImpl::forward(
    const at::Tensor& input, const std::optional<at::Tensor>& attn_mask) {
  if (input.dim() != 3) {
    throw std::invalid_argument(
        c10::str("ParallelSelfAttention: the input has the shape ",
                 input.sizes(), "; give [batch, sequence, ", embed_dim, "]"));
  }
  if (attn_mask && attn_mask->dim() != 2 &&
      (attn_mask->dim() != 4 || attn_mask->size(1) != 1)) {
    throw std::invalid_argument(c10::str(
        "ParallelSelfAttention: attn_mask has the shape ", attn_mask->sizes(),
        "; give [sequence, sequence] or [batch, 1, sequence, "
        "sequence]: it is the same for all heads"));
  }
  auto whole = input;
  if (group_) {
    whole = options.sequence_parallel ? all_gather_sequence(input, 1, group_)
                                      : copy_to_tensor_group(input, group_);
  }
  const int64_t head_size = embed_dim / num_heads;
  // [batch, this rank's heads, sequence, head_size]
  auto heads = [&](ColumnParallelLinear& layer) {
    return layer->forward(whole).unflatten(-1, {-1, head_size}).transpose(1, 2);
  };
  const double dropout = is_training() ? options.dropout : 0;
  auto q = heads(query);
  auto k = heads(key);
  auto v = heads(value);
  at::Tensor mixed;
  {
    std::optional<TensorParallelRandom> random;
    if (dropout > 0 && group_) random.emplace(group_);
    mixed = at::scaled_dot_product_attention(q, k, v, attn_mask, dropout,
                                             options.is_causal);
  }
  return projection->forward(mixed.transpose(1, 2).flatten(2));
}

}  // namespace lockstep::nn
