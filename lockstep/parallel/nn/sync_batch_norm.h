#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <utility>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// LibTorch's BatchNormOptions with the same names and defaults, and the group.
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(int64_t num_features)
      : num_features_(num_features) {}
  /* implicit */ SyncBatchNormOptions(const torch::nn::BatchNormOptions& plain)
      : num_features_(plain.num_features()),
        eps_(plain.eps()),
        momentum_(plain.momentum()),
        affine_(plain.affine()),
        track_running_stats_(plain.track_running_stats()) {}

  TORCH_ARG(int64_t, num_features);
  TORCH_ARG(double, eps) = 1e-5;
  // The weight of a new batch in the running statistics; if it is none, they
  // are the plain average over all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  // The ranks that normalise together, including this one. Null means the
  // default group.
  TORCH_ARG(ProcessGroupPtr, process_group) = {};
};

// The parts of a batch norm; the members have the names of BatchNorm's.
struct SyncBatchNormState {
  SyncBatchNormOptions options;
  at::Tensor weight{};  // [num_features]; undefined unless affine
  at::Tensor bias{};
  // [num_features]; these and the count are undefined unless
  // track_running_stats.
  at::Tensor running_mean{};
  at::Tensor running_var{};
  at::Tensor num_batches_tracked{};  // int64, no dimensions
};

}  // namespace lockstep::nn

namespace lockstep::internal {

// Makes fresh tensors, as a new BatchNorm has them.
void reset(nn::SyncBatchNormState& state);
at::Tensor forward(nn::SyncBatchNormState& state, size_t dimensions,
                   bool training, const at::Tensor& input);
void pretty_print(const nn::SyncBatchNormState& state, size_t dimensions,
                  std::ostream& stream);

}  // namespace lockstep::internal

namespace lockstep::nn {

// Batch normalisation with the mean and variance of all ranks' samples: it
// computes what torch::nn::BatchNorm would in one process with the whole batch.
// It follows torch.nn.SyncBatchNorm (PyTorch documentation), but works on CPUs,
// too.
//
// Input: [N, C, ...] of any floating-point type; N may differ between ranks and
// be 0. 16-bit types are reduced in float32 or wider; weight, bias and running
// statistics have the input's type or, for 16-bit types, float32.
//
// forward() in training and the backward of its result are collective, and all
// ranks of the group must call them alike: one all_gather of 2 C + 1 numbers,
// one all_reduce of 2 C (if the input needs a gradient). Running statistics
// have the same bits on every rank. The gradients of weight and bias are those
// of this rank's samples: DistributedDataParallel averages them. In eval mode,
// in a group of one, or without a process group nothing is communicated, and
// this is a plain BatchNorm.
//
// Throws std::invalid_argument for a wrong number of dimensions or channels or
// a wrong dtype; and, on every rank, if a channel has only one value on all
// ranks together, because one value has no variance. backward() with
// create_graph throws std::runtime_error: there is no second derivative. On a
// GPU it cannot be captured in a graph.
//
// This is not derived from BatchNorm, because BatchNorm's forward is not
// virtual. forward() is declared in the derived classes because
// Sequential::at() requires it.
template <size_t D, typename Derived>
class SyncBatchNormImplBase : public torch::nn::Cloneable<Derived>,
                              public SyncBatchNormState {
 public:
  explicit SyncBatchNormImplBase(SyncBatchNormOptions given)
      : SyncBatchNormState{.options = std::move(given)} {
    SyncBatchNormImplBase::reset();
  }
  // Shares the tensors of `state`, which must fit its options.
  explicit SyncBatchNormImplBase(SyncBatchNormState state)
      : SyncBatchNormState(std::move(state)) {
    register_state();
  }

  void reset() override {
    internal::reset(*this);
    register_state();
  }

  void pretty_print(std::ostream& stream) const override {
    internal::pretty_print(*this, D, stream);
  }

 private:
  void register_state() {
    this->register_parameter("weight", weight,
                             weight.defined() && weight.requires_grad());
    this->register_parameter("bias", bias,
                             bias.defined() && bias.requires_grad());
    this->register_buffer("running_mean", running_mean);
    this->register_buffer("running_var", running_var);
    this->register_buffer("num_batches_tracked", num_batches_tracked);
  }
};

// Input [N, C] or [N, C, L].
class SyncBatchNorm1dImpl
    : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
  at::Tensor forward(const at::Tensor& input) {
    return internal::forward(*this, 1, is_training(), input);
  }
};
TORCH_MODULE(SyncBatchNorm1d);

// Input [N, C, H, W], channels last or not.
class SyncBatchNorm2dImpl
    : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
  at::Tensor forward(const at::Tensor& input) {
    return internal::forward(*this, 2, is_training(), input);
  }
};
TORCH_MODULE(SyncBatchNorm2d);

// Input [N, C, D, H, W], channels last or not.
class SyncBatchNorm3dImpl
    : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase::SyncBatchNormImplBase;
  at::Tensor forward(const at::Tensor& input) {
    return internal::forward(*this, 3, is_training(), input);
  }
};
TORCH_MODULE(SyncBatchNorm3d);

}  // namespace lockstep::nn
