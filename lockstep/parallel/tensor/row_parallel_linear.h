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
