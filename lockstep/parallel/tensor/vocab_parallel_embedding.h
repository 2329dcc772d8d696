#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// All ranks of the group must give the same options.
struct VocabParallelEmbeddingOptions {
  // The ranks over which the table is divided. Null means the default group.
  ProcessGroupPtr group{};

  // As in torch::nn::EmbeddingOptions: this row of the table is zero at first
  // and gets no gradient.
  std::optional<int64_t> padding_idx{};

  // Whether each rank gets its part of the sequence, of which all ranks have
  // equal parts. If it is false, every rank gets all of the output.
  bool sequence_parallel{false};

  // The dimension of the output that is divided if sequence_parallel is set; 1
  // for [batch, sequence, features].
  int64_t sequence_dim{1};
};

// An embedding of which each rank has some rows of the table:
// VocabParallelEmbedding of Megatron-LM (section 3 of its paper),
// RowwiseParallel of an nn.Embedding in torch.distributed.tensor.parallel.
//
// `weight` is [part of num_embeddings, embedding_dim], in the parts of
// torch.chunk(): the last ranks may have fewer rows than the others, or none.
// Input: integers of any shape, equal on all ranks; output: the same shape and
// embedding_dim. For the last layer of a model that shares the table, multiply
// with it: at::linear(copy_to_tensor_group(x, group), embedding->weight) gives
// each rank its part of the logits.
//
// Initial values are those of ColumnParallelLinear's description. forward() is
// one collective; backward is one with sequence_parallel. In a group of one, or
// without process groups, it is a torch::nn::Embedding. Throws
// std::invalid_argument if an index is not in the table; on a GPU the kernel of
// the first rank fails then.
class VocabParallelEmbeddingImpl
    : public torch::nn::Cloneable<VocabParallelEmbeddingImpl> {
 public:
  VocabParallelEmbeddingImpl(int64_t rows, int64_t columns,
                             const VocabParallelEmbeddingOptions& given = {});
  // Copies this rank's part of `whole`, which is equal on all ranks, and its
  // padding_idx. Throws std::invalid_argument if `whole` has options that this
  // type lacks (max_norm, scale_grad_by_freq, sparse).
  explicit VocabParallelEmbeddingImpl(
      const torch::nn::Embedding& whole,
      const VocabParallelEmbeddingOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  VocabParallelEmbeddingOptions options;
  int64_t num_embeddings;  // on all ranks together
  int64_t embedding_dim;
  at::Tensor weight;

 private:
  void take_part(const at::Tensor& whole);

  // tensor_group() when the parameters were made, which fit no other group.
  ProcessGroupPtr group_;
};

// The module holder. Its constructors are written out so that options can be
// given in braces.
class VocabParallelEmbedding
    : public torch::nn::ModuleHolder<VocabParallelEmbeddingImpl> {
 public:
  using Impl [[maybe_unused]] = VocabParallelEmbeddingImpl;
  using torch::nn::ModuleHolder<VocabParallelEmbeddingImpl>::ModuleHolder;
  VocabParallelEmbedding(int64_t num_embeddings, int64_t embedding_dim,
                         const VocabParallelEmbeddingOptions& options)
      : ModuleHolder(
            std::make_shared<Impl>(num_embeddings, embedding_dim, options)) {}
  VocabParallelEmbedding(const torch::nn::Embedding& whole,
                         const VocabParallelEmbeddingOptions& options)
      : ModuleHolder(std::make_shared<Impl>(whole, options)) {}
};

}  // namespace lockstep::nn
