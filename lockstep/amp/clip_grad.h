#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

// Clipping of gradients, after torch.nn.utils (PyTorch documentation,
// "torch.nn.utils", clip_grad_norm_ and the functions beside it).
//
// Each function takes the parameters (those without gradient do not count), or
// an optimizer: then its gradients are clipped whichever way it keeps them. Of
// a sharded optimizer (GradientShards) the norm is that of all ranks' parts
// together: the number that one process with all gradients would get, but for
// the rounding of float; every rank calls, and all get the same. For any other
// optimizer it is that of its parameters on this rank, and nothing is
// communicated; behind DistributedDataParallel it is the same everywhere.
//
// What a list or an optimizer names twice counts once (distinct_tensors.h): a
// tied parameter, which LibTorch's module->parameters() names twice and
// Python's once.
//
// Gradients may be of several devices and dtypes. They may be sparse (COO), for
// norms of a positive order: their values count, added up where an index is
// there twice. Gradients scaled by a GradScaler are unscaled first.
//
// Not torch::nn::utils' functions of LibTorch, because these return a double,
// for which they wait for the device, know no order below 0, and take order 0
// for something else than Python.
//
// Errors. std::invalid_argument for a bound that is negative or no number, for
// order 0 of shards (it counts gradients, of which they are parts), and what
// gradient_shards() throws; c10::DistBackendError if ranks cannot agree.
namespace lockstep {

// The norm of all `tensors` as if they were one vector: of order `norm_type`
// (infinity: the largest absolute value) over each tensor's norm of that order.
// 0-dimensional, on the first tensor's device, in the dtype that theirs
// promote to; 0 of no tensors. Waits for the device only with
// `error_if_nonfinite`, which throws std::runtime_error if the norm is NaN or
// infinite. Not differentiated.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors,
                          double norm_type = 2.0,
                          bool error_if_nonfinite = false);

// The same of the optimizer's gradients; of a sharded one collective, float64,
// on its first parameter's device, and if it is not finite all ranks throw.
at::Tensor get_total_norm(torch::optim::Optimizer& optimizer,
                          double norm_type = 2.0,
                          bool error_if_nonfinite = false);

// Scales all gradients by the one factor max_norm / (total_norm + 1e-6), unless
// that is above 1. A norm that is infinite makes them 0, one that is NaN makes
// them NaN. Nothing is communicated.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters,
                           double max_norm, const at::Tensor& total_norm);
void clip_grads_with_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           const at::Tensor& total_norm);

// Both: returns the gradients' norm as it was before. If `error_if_nonfinite`
// throws, gradients are as they were.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters,
                           double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);
at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           double norm_type = 2.0,
                           bool error_if_nonfinite = false);

// Each element of the gradients is brought into [-clip_value, clip_value]; NaN
// stays. Nothing is communicated. A sparse gradient becomes coalesced.
void clip_grad_value_(const std::vector<at::Tensor>& parameters,
                      double clip_value);
void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value);

}  // namespace lockstep
