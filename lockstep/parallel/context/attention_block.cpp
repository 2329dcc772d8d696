#include "lockstep/parallel/context/attention_block.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

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

}  // namespace

at::ScalarType sum_dtype(const at::Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

void AttentionSum::add(const AttentionBlock& block, const at::Tensor& key,
                       const at::Tensor& value) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      with_dense_rows(tokens_of(query_, block.queries)),
      with_dense_rows(tokens_of(key, block.keys)),
      with_dense_rows(tokens_of(value, block.keys)), /*dropout_p=*/0,
      block.causal,
      /*attn_mask=*/{}, scale_);
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
  auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          with_dense_rows(tokens_of(result.grad_output, block.queries)),
          with_dense_rows(tokens_of(result.query, block.queries)),
          with_dense_rows(tokens_of(key, block.keys)),
          with_dense_rows(tokens_of(value, block.keys)),
          with_dense_rows(tokens_of(result.output, block.queries)),
          tokens_of(result.logsumexp, block.queries), /*dropout_p=*/0,
          block.causal,
          /*attn_mask=*/{}, scale);
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
