#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// All ranks of the group must give the same options.
struct ColumnParallelLinearOptions {
  // The ranks over which the layer is divided. Null means the default group.
  ProcessGroupPtr group{};

  // Whether it has a bias. A layer that is made from a torch::nn::Linear has a
  // bias if that has one.
  bool bias{true};

  // Whether every rank gets all output features. Otherwise it gets its own part
  // of them, which is what RowParallelLinear takes. (DTensor: output_layouts.)
  bool gather_output{false};

  // Whether the input is this rank's part of the sequence, of which all ranks
  // have equal parts; forward gathers it. If it is false, the input is
  // replicated. (DTensor: input_layouts = Shard(1).)
  bool sequence_parallel{false};

  // The dimension of the input that is divided if sequence_parallel is set; 1
  // for [batch, sequence, features].
  int64_t sequence_dim{1};

  // Whether backward adds up the ranks' gradients of the input. False if the
  // caller has passed the input through copy_to_tensor_group() or
  // all_gather_sequence(), once for several layers. Not with
  // sequence_parallel.
  bool reduce_input_gradient{true};
};

// A linear layer of which each rank has a part of the output features:
// ColwiseParallel of torch.distributed.tensor.parallel (PyTorch documentation),
// ColumnParallelLinear of Megatron-LM (section 3 of its paper).
//
// `weight` is [part of out_features, in_features] and `bias` [part of
// out_features]; the parts are those of torch.chunk(), so the last ranks may
// have less than the others, or nothing. Input [..., in_features] of the
// weight's dtype; output [..., part of out_features], or all of them.
//
// A new layer has the values of a new torch::nn::Linear: each rank draws all of
// them and keeps its part. So the ranks of the group must have equal states of
// the default generator before the constructor, as they have after the same
// torch::manual_seed() and the same modules; verify_replicated() checks it.
// Construction allocates the whole weight for a moment, and communicates
// nothing.
//
// forward() is collective with sequence_parallel or gather_output, and its
// backward is unless reduce_input_gradient is false: one collective each. In a
// group of one, or without process groups, it is a torch::nn::Linear. Throws
// std::invalid_argument if the input has another number of features.
class ColumnParallelLinearImpl
    : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  ColumnParallelLinearImpl(int64_t inputs, int64_t outputs,
                           const ColumnParallelLinearOptions& given = {});
  // Copies this rank's part of `whole`, which is equal on all ranks.
  explicit ColumnParallelLinearImpl(
      const torch::nn::Linear& whole,
      const ColumnParallelLinearOptions& given = {});
  // Does the same with the tensors: [out_features, in_features], and
  // [out_features] or an undefined tensor.
  ColumnParallelLinearImpl(const at::Tensor& whole_weight,
                           const at::Tensor& whole_bias,
                           const ColumnParallelLinearOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  ColumnParallelLinearOptions options;
  int64_t in_features;
  int64_t out_features;  // on all ranks together
  at::Tensor weight;
  at::Tensor bias;  // undefined without bias

 private:
  void check_options() const;
  void take_parts(const at::Tensor& whole_weight, const at::Tensor& whole_bias);

  // tensor_group() when the parameters were made, which fit no other group.
  ProcessGroupPtr group_;
};

// The module holder. Its constructors are written out so that options can be
// given in braces.
class ColumnParallelLinear
    : public torch::nn::ModuleHolder<ColumnParallelLinearImpl> {
 public:
  using Impl [[maybe_unused]] = ColumnParallelLinearImpl;
  using torch::nn::ModuleHolder<ColumnParallelLinearImpl>::ModuleHolder;
  ColumnParallelLinear(int64_t in_features, int64_t out_features,
                       const ColumnParallelLinearOptions& options)
      : ModuleHolder(
            std::make_shared<Impl>(in_features, out_features, options)) {}
  ColumnParallelLinear(const torch::nn::Linear& whole,
                       const ColumnParallelLinearOptions& options)
      : ModuleHolder(std::make_shared<Impl>(whole, options)) {}
  ColumnParallelLinear(const at::Tensor& whole_weight,
                       const at::Tensor& whole_bias,
                       const ColumnParallelLinearOptions& options)
      : ModuleHolder(
            std::make_shared<Impl>(whole_weight, whole_bias, options)) {}
};

// All ranks of the group must give the same options.
struct RowParallelLinearOptions {
  // The ranks over which the layer is divided. Null means the default group.
  ProcessGroupPtr group{};

  // Whether it has a bias. A layer that is made from a torch::nn::Linear has a
  // bias if that has one.
  bool bias{true};

  // Whether the input is this rank's part of the features, as
  // ColumnParallelLinear returns them. If it is false, the input is replicated,
  // and forward takes the part. (DTensor: input_layouts.)
  bool input_is_parallel{true};

  // Whether each rank gets its part of the sequence, of which all ranks have
  // equal parts. If it is false, every rank gets all of the output. (DTensor:
  // output_layouts = Shard(1).)
  bool sequence_parallel{false};

  // The dimension of the output that is divided if sequence_parallel is set; 1
  // for [batch, sequence, features].
  int64_t sequence_dim{1};
};

// A linear layer of which each rank has a part of the input features, and whose
// output is the sum over the ranks: RowwiseParallel of
// torch.distributed.tensor.parallel (PyTorch documentation), RowParallelLinear
// of Megatron-LM (section 3 of its paper).
//
// `weight` is [out_features, part of in_features], in the parts of
// torch.chunk(); `bias`, [out_features], is equal on all ranks. It is added
// once, after the sum, and its gradient is complete and equal on all ranks.
// Input [..., part of in_features] of the weight's dtype; output [...,
// out_features], summed in the dtype that the product has.
//
// Initial values are those of ColumnParallelLinear's description. forward() is
// one collective; backward is one if the output or the input is divided
// (sequence_parallel, or input_is_parallel false), and with sequence_parallel
// one more if there is a bias. In a group of one, or without process groups, it
// is a torch::nn::Linear. Throws std::invalid_argument if the input has another
// number of features.
class RowParallelLinearImpl
    : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  RowParallelLinearImpl(int64_t inputs, int64_t outputs,
                        const RowParallelLinearOptions& given = {});
  // Copies this rank's part of `whole`, which is equal on all ranks.
  explicit RowParallelLinearImpl(const torch::nn::Linear& whole,
                                 const RowParallelLinearOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  RowParallelLinearOptions options;
  int64_t in_features;  // on all ranks together
  int64_t out_features;
  at::Tensor weight;
  at::Tensor bias;  // undefined without bias

 private:
  void take_parts(const at::Tensor& whole_weight, const at::Tensor& whole_bias);

  // tensor_group() when the parameters were made, which fit no other group.
  ProcessGroupPtr group_;
};

// The module holder. Its constructors are written out so that options can be
// given in braces.
class RowParallelLinear
    : public torch::nn::ModuleHolder<RowParallelLinearImpl> {
 public:
  using Impl [[maybe_unused]] = RowParallelLinearImpl;
  using torch::nn::ModuleHolder<RowParallelLinearImpl>::ModuleHolder;
  RowParallelLinear(int64_t in_features, int64_t out_features,
                    const RowParallelLinearOptions& options)
      : ModuleHolder(
            std::make_shared<Impl>(in_features, out_features, options)) {}
  RowParallelLinear(const torch::nn::Linear& whole,
                    const RowParallelLinearOptions& options)
      : ModuleHolder(std::make_shared<Impl>(whole, options)) {}
};

}  // namespace lockstep::nn
