#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// The names and defaults of torch::nn::LayerNormOptions and torch.nn.RMSNorm.
struct SequenceParallelNormOptions {
  // The ranks over which the sequence is divided. Null means the default group.
  ProcessGroupPtr group{};

  // Added to the variance (LayerNorm) or the mean of squares (RMSNorm). None:
  // 1e-5 for LayerNorm, and for RMSNorm the smallest number that changes 1 in
  // the input's dtype.
  std::optional<double> eps{};

  // Whether it has a weight, and a LayerNorm a bias.
  bool elementwise_affine{true};
};

// Layer normalisation of this rank's part of the sequence: SequenceParallel of
// torch.distributed.tensor.parallel (PyTorch documentation), section 4.2.2 of
// Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
// Models".
//
// Weight and bias are equal on all ranks. A rank's part of the sequence gives
// only a term of their gradients, so backward adds the terms up, in one
// all_reduce: when backward() returns, the gradients are complete and equal on
// all ranks. This is also so if the module is used several times, in each
// backward pass, and inside DistributedDataParallel over another group.
//
// forward() communicates nothing. It takes any input whose last dimensions are
// those of `normalized_shape`. In a group of one, or without process groups, it
// is a torch::nn::LayerNorm. On activations that are equal on all ranks of the
// group, use that one instead.
class SequenceParallelLayerNormImpl
    : public torch::nn::Cloneable<SequenceParallelLayerNormImpl> {
 public:
  // Normalises the last dimension, which has `features` elements.
  explicit SequenceParallelLayerNormImpl(
      int64_t features, const SequenceParallelNormOptions& given = {});
  // Takes the normalized_shape and eps of `plain`, and copies its parameters.
  explicit SequenceParallelLayerNormImpl(
      const torch::nn::LayerNorm& plain,
      const SequenceParallelNormOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  SequenceParallelNormOptions options;
  std::vector<int64_t> normalized_shape;
  at::Tensor weight;  // undefined unless elementwise_affine; and so is the bias
  at::Tensor bias;

 private:
  ProcessGroupPtr group_;  // that of the options when the module was made
};

// The same for root mean square normalisation, torch.nn.RMSNorm. LibTorch has
// the function at::rms_norm() but no module, so this one also serves outside of
// sequence parallelism: with a group of one rank. `weight` only; no bias.
class SequenceParallelRMSNormImpl
    : public torch::nn::Cloneable<SequenceParallelRMSNormImpl> {
 public:
  // Normalises the last dimension, which has `features` elements.
  explicit SequenceParallelRMSNormImpl(
      int64_t features, const SequenceParallelNormOptions& given = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  SequenceParallelNormOptions options;
  std::vector<int64_t> normalized_shape;
  at::Tensor weight;  // undefined unless elementwise_affine

 private:
  ProcessGroupPtr group_;  // that of the options when the module was made
};

// The module holders. Their constructors are written out so that options can be
// given in braces.
class SequenceParallelLayerNorm
    : public torch::nn::ModuleHolder<SequenceParallelLayerNormImpl> {
 public:
  using Impl [[maybe_unused]] = SequenceParallelLayerNormImpl;
  using torch::nn::ModuleHolder<SequenceParallelLayerNormImpl>::ModuleHolder;
  SequenceParallelLayerNorm(int64_t features,
                            const SequenceParallelNormOptions& options)
      : ModuleHolder(std::make_shared<Impl>(features, options)) {}
  SequenceParallelLayerNorm(const torch::nn::LayerNorm& plain,
                            const SequenceParallelNormOptions& options)
      : ModuleHolder(std::make_shared<Impl>(plain, options)) {}
};
class SequenceParallelRMSNorm
    : public torch::nn::ModuleHolder<SequenceParallelRMSNormImpl> {
 public:
  using Impl [[maybe_unused]] = SequenceParallelRMSNormImpl;
  using torch::nn::ModuleHolder<SequenceParallelRMSNormImpl>::ModuleHolder;
  SequenceParallelRMSNorm(int64_t features,
                          const SequenceParallelNormOptions& options)
      : ModuleHolder(std::make_shared<Impl>(features, options)) {}
};

}  // namespace lockstep::nn
