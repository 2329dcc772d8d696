#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_module_holder.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/tensor/parallel_linear.h"

namespace lockstep::nn {

// All ranks of the group must give the same options.
struct ParallelSelfAttentionOptions {
  // The ranks over which the heads are divided. Null means the default group.
  ProcessGroupPtr group{};

  // Whether the four linear layers have biases.
  bool bias{true};

  // Whether a position sees only itself and those before it.
  bool is_causal{false};

  // The probability with which a weight of attention is dropped in training.
  // Each rank draws other numbers for its heads (TensorParallelRandom).
  double dropout{0};

  // Whether input and output are this rank's part of the sequence, of which all
  // ranks have equal parts. If it is false, they are replicated.
  bool sequence_parallel{false};
};

// Self-attention of which each rank has some of the heads (section 3 of
// Megatron-LM's paper): `query`, `key` and `value` are column-parallel, and
// `projection` is row-parallel. They are layers of their own, not one packed
// matrix, because a part of a packed matrix is not a rectangle, and snapshots
// keep rectangles.
//
// Input and output: [batch, sequence, embed_dim]. forward() also takes what is
// added to the products of query and key, or a mask of bool in which true means
// "sees" (as at::scaled_dot_product_attention): [sequence, sequence], or four
// dimensions that broadcast to [batch, 1, sequence, sequence]; sequence is that
// of all ranks together. Not with is_causal.
//
// A new module has the values that four torch::nn::Linear(embed_dim, embed_dim)
// made in the order query, key, value, projection have; what
// ColumnParallelLinear says of initial values holds here, too.
//
// forward() is one collective, two with sequence_parallel; so is backward (one
// more for the bias of `projection` then). Throws std::invalid_argument if
// embed_dim is not a multiple of num_heads, or num_heads not of the number of
// ranks.
class ParallelSelfAttentionImpl
    : public torch::nn::Cloneable<ParallelSelfAttentionImpl> {
 public:
  ParallelSelfAttentionImpl(int64_t features, int64_t heads,
                            const ParallelSelfAttentionOptions& given = {});
  // Copies this rank's heads from a model of one process. `packed` is
  // Linear(embed_dim, 3 * embed_dim), whose output features are those of query,
  // key and value one after the other, each ordered by head, as in
  // MultiheadAttention's in_proj_weight. `mixing` is the layer after
  // attention. Both have a bias or none, whatever `given` says.
  ParallelSelfAttentionImpl(const torch::nn::Linear& packed,
                            const torch::nn::Linear& mixing, int64_t heads,
                            const ParallelSelfAttentionOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::Tensor>& attn_mask = {});

  ParallelSelfAttentionOptions options;
  int64_t embed_dim;
  int64_t num_heads;  // on all ranks together
  ColumnParallelLinear query{nullptr};
  ColumnParallelLinear key{nullptr};
  ColumnParallelLinear value{nullptr};
  RowParallelLinear projection{nullptr};

 protected:
  // Lets a Sequential call forward() with the input alone.
  FORWARD_HAS_DEFAULT_ARGS({1,
                            torch::nn::AnyValue(std::optional<at::Tensor>())})

 private:
  template <typename Module, typename... Arguments>
  friend struct torch::nn::AnyModuleHolder;

  void check_arguments() const;
  ColumnParallelLinearOptions column_options() const;
  RowParallelLinearOptions row_options() const;
  void register_layers();

  ProcessGroupPtr group_;  // that of the layers
};

// The module holder. Its constructors are written out so that options can be
// given in braces.
class ParallelSelfAttention
    : public torch::nn::ModuleHolder<ParallelSelfAttentionImpl> {
 public:
  using Impl [[maybe_unused]] = ParallelSelfAttentionImpl;
  using torch::nn::ModuleHolder<ParallelSelfAttentionImpl>::ModuleHolder;
  ParallelSelfAttention(int64_t embed_dim, int64_t num_heads,
                        const ParallelSelfAttentionOptions& options)
      : ModuleHolder(std::make_shared<Impl>(embed_dim, num_heads, options)) {}
  ParallelSelfAttention(const torch::nn::Linear& packed,
                        const torch::nn::Linear& projection, int64_t num_heads,
                        const ParallelSelfAttentionOptions& options)
      : ModuleHolder(
            std::make_shared<Impl>(packed, projection, num_heads, options)) {}
};

}  // namespace lockstep::nn
