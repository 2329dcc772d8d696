#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "lockstep/state/box.h"

// Attention of some queries to some keys on one rank, and the sum of several
// such blocks. It follows Liu, Zaharia and Abbeel, "Ring Attention with
// Blockwise Transformers for Near-Infinite Context" (ICLR 2024), section 3, on
// LibTorch's flash attention for the CPU; on other devices by products of
// matrices, which take the memory of the queries times the keys of a block.
//
// Query, output and their gradients are [batch, heads, tokens, head_dim]; key,
// value and theirs [batch, key heads, tokens, head_dim]: key head h is that of
// query heads h * n to (h + 1) * n - 1, with n = heads / key heads (LibTorch's
// kernels have that). The log-sum-exp is [batch, heads, tokens of the query]:
// the logarithm of the sum of exp(scale * query . key) over the keys.
namespace lockstep::internal {

// Which of this rank's queries attend to which of a block's keys, and whether
// with a causal mask (then both have the same tokens).
struct AttentionBlock {
  Range queries;
  Range keys;
  bool causal;
  bool operator==(const AttentionBlock&) const = default;
};

// The dtype in which blocks are summed: that of log-sum-exps. float64 for
// float64, otherwise float32.
at::ScalarType sum_dtype(const at::Tensor& tensor);

// The output of some queries, summed block by block. The log-sum-exps weigh the
// blocks, so the result is the softmax over all keys. Sums are in sum_dtype(),
// so a half type is rounded once for each block, and the rounded numbers are
// averaged: the error does not grow with the number of blocks.
class AttentionSum {
 public:
  AttentionSum(at::Tensor query, std::optional<double> scale)
      : query_(std::move(query)), scale_(scale) {}

  // Adds the attention to the keys of `block`. `key` and `value` are whole:
  // block.keys counts in them. The first block has all queries.
  void add(const AttentionBlock& block, const at::Tensor& key,
           const at::Tensor& value);

  // Returns the output in the query's dtype; zeros if there was no block.
  at::Tensor output() const;
  // Returns the log-sum-exp over all blocks, in sum_dtype(); minus infinity if
  // there was none.
  at::Tensor logsumexp() const;

 private:
  at::Tensor query_;
  std::optional<double> scale_;
  at::Tensor output_;
  at::Tensor logsumexp_;
};

// The results of forward that backward uses; `output` and `logsumexp` are over
// all blocks.
struct AttentionResult {
  at::Tensor query;
  at::Tensor output;
  at::Tensor logsumexp;
  at::Tensor grad_output;
};

// The gradients of one block, in the dtype of the inputs.
struct BlockGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

// Returns the gradients of the queries, keys and values of `block`. With the
// log-sum-exp and the output over all blocks those of a block are exact: their
// sum over all blocks is the gradient. `key` and `value` are as for
// AttentionSum::add().
BlockGradients block_gradients(const AttentionBlock& block,
                               const AttentionResult& result,
                               const at::Tensor& key, const at::Tensor& value,
                               std::optional<double> scale);

// Adds `part` to the gradient of all queries and to that of all keys and values
// [2, batch, key heads, tokens, head_dim].
void add_gradients(const AttentionBlock& block, const BlockGradients& part,
                   const at::Tensor& grad_query,
                   const at::Tensor& grad_key_value);

}  // namespace lockstep::internal
