#include "lockstep/parallel/context/attention_block.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace lockstep::internal {
namespace {

// The kernels give tokens to matrix products as rows, and check no strides.
at::Tensor with_dense_rows(const at::Tensor& tensor) {
  const bool dense =
      tensor.stride(3) == 1 && tensor.stride(2) >= tensor.size(3);
  return dense ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor tokens_of(const at::Tensor& tensor, const Range& tokens) {
  return tensor.narrow(/*dim=*/2, tokens.begin, tokens.size());
}

// The products below take the memory of queries times keys, in sum_dtype().
// LibTorch's kernels for devices have dtypes and layouts of log-sum-exps that
// differ from device to device.

// Repeats each key head for the query heads that share it.
at::Tensor for_heads_of(const at::Tensor& query, const at::Tensor& key) {
  return key.to(sum_dtype(query))
      .repeat_interleave(query.size(1) / key.size(1), 1);
}

// Returns scale * query . key, minus infinity where it is masked.
at::Tensor scores_of(const at::Tensor& query, const at::Tensor& keys,
                     bool causal, double scale) {
  auto scores =
      at::matmul(query.to(keys.scalar_type()) * scale, keys.transpose(2, 3));
  if (!causal) return scores;
  const auto later =
      at::ones({query.size(2), keys.size(2)}, scores.options().dtype(at::kBool))
          .triu_(1);
  return scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
}

double scale_of(const at::Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
}

std::tuple<at::Tensor, at::Tensor> attention_by_products(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    bool causal, std::optional<double> scale) {
  const auto scores = scores_of(query, for_heads_of(query, key), causal,
                                scale_of(query, scale));
  const auto logsumexp = scores.logsumexp(-1);
  const auto weights = (scores - logsumexp.unsqueeze(-1)).exp_();
  return {
      at::matmul(weights, for_heads_of(query, value)).to(query.scalar_type()),
      logsumexp};
}

BlockGradients gradients_by_products(
    const at::Tensor& grad_output, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& output,
    const at::Tensor& logsumexp, bool causal, std::optional<double> scale) {
  const double factor = scale_of(query, scale);
  const auto keys = for_heads_of(query, key);
  const auto grad = grad_output.to(keys.scalar_type());
  const auto weights =
      (scores_of(query, keys, causal, factor) - logsumexp.unsqueeze(-1)).exp_();
  const auto grad_weights =
      at::matmul(grad, for_heads_of(query, value).transpose(2, 3));
  const auto grad_scores =
      (grad_weights - (grad * output).sum(-1, /*keepdim=*/true))
          .mul_(weights)
          .mul_(factor);
  // Sums over the query heads that share a key head.
  const auto of_key_heads = [&](const at::Tensor& gradient) {
    return gradient.unflatten(1, {key.size(1), -1})
        .sum(2)
        .to(key.scalar_type());
  };
  return {at::matmul(grad_scores, keys).to(query.scalar_type()),
          of_key_heads(at::matmul(grad_scores.transpose(2, 3),
                                  query.to(keys.scalar_type()))),
          of_key_heads(at::matmul(weights.transpose(2, 3), grad))};
}

}  // namespace

at::ScalarType sum_dtype(const at::Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

void AttentionSum::add(const AttentionBlock& block, const at::Tensor& key,
                       const at::Tensor& value) {
  const auto queries = with_dense_rows(tokens_of(query_, block.queries));
  const auto keys = with_dense_rows(tokens_of(key, block.keys));
  const auto values = with_dense_rows(tokens_of(value, block.keys));
  auto [output, logsumexp] =
      query_.is_cpu()
          ? at::_scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, /*dropout_p=*/0, block.causal,
                /*attn_mask=*/{}, scale_)
          : attention_by_products(queries, keys, values, block.causal, scale_);
  if (!output_.defined()) {
    output_ = output;
    logsumexp_ = logsumexp;
    return;
  }
  const auto dtype = sum_dtype(query_);
  output_ = output_.to(dtype);
  auto old = tokens_of(logsumexp_, block.queries);
  // exp(logsumexp) / (exp(logsumexp) + exp(old)), without overflow.
  auto weight = at::sigmoid(logsumexp - old).unsqueeze(-1);
  tokens_of(output_, block.queries).lerp_(output.to(dtype), weight);
  old.copy_(at::logaddexp(old, logsumexp));
}

at::Tensor AttentionSum::output() const {
  if (!output_.defined()) return at::zeros_like(query_);
  return output_.to(query_.scalar_type());
}

at::Tensor AttentionSum::logsumexp() const {
  if (logsumexp_.defined()) return logsumexp_;
  return at::full(query_.sizes().slice(0, 3),
                  -std::numeric_limits<double>::infinity(),
                  query_.options().dtype(sum_dtype(query_)));
}

BlockGradients block_gradients(const AttentionBlock& block,
                               const AttentionResult& result,
                               const at::Tensor& key, const at::Tensor& value,
                               std::optional<double> scale) {
  const auto grad_output =
      with_dense_rows(tokens_of(result.grad_output, block.queries));
  const auto queries = with_dense_rows(tokens_of(result.query, block.queries));
  const auto keys = with_dense_rows(tokens_of(key, block.keys));
  const auto values = with_dense_rows(tokens_of(value, block.keys));
  const auto output = with_dense_rows(tokens_of(result.output, block.queries));
  const auto logsumexp = tokens_of(result.logsumexp, block.queries);
  if (!queries.is_cpu()) {
    return gradients_by_products(grad_output, queries, keys, values, output,
                                 logsumexp, block.causal, scale);
  }
  auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grad_output, queries, keys, values, output, logsumexp,
          /*dropout_p=*/0, block.causal, /*attn_mask=*/{}, scale);
  return {grad_query, grad_key, grad_value};
}

void add_gradients(const AttentionBlock& block, const BlockGradients& part,
                   const at::Tensor& grad_query,
                   const at::Tensor& grad_key_value) {
  tokens_of(grad_query, block.queries).add_(part.query);
  tokens_of(grad_key_value[0], block.keys).add_(part.key);
  tokens_of(grad_key_value[1], block.keys).add_(part.value);
}

}  // namespace lockstep::internal
