#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

// Clipping of gradients, as torch.nn.utils does it (PyTorch documentation,
// "torch.nn.utils", clip_grad_norm_ and the functions beside it).
//
// Each function takes parameters (those without a gradient do not count) or an
// optimizer, whose gradients are then clipped however it stores them. For a
// sharded optimizer (GradientShards) the norm covers all ranks' parts together:
// it is the number that one process with all gradients would get, except for
// float rounding; every rank must call, and all ranks get the same number. For
// any other optimizer the norm covers the parameters on this rank, and nothing
// is communicated; with DistributedDataParallel it is the same on every rank.
//
// Parameters that are parts of larger ones (FSDP, tensor parallelism, the
// stages of a pipeline) know which ranks have the other parts. Given such
// parameters, or an optimizer of them, the norm is that of the whole model, as
// one process would get it: parts are added up over exactly the ranks that
// divide the parameter, what all ranks have counts once, and so does a weight
// that two stages of a pipeline share. The call is then collective: every rank
// that has a part of the model must give all parameters that it has of it,
// those without gradients too, and all ranks get the same number, in float64
// on the device of the first parameter. Computing the norm waits for the device
// then. A gradient by itself does not know of what it is a part, so the norm of
// a list of gradients is always that of this rank.
//
// A tensor that a list or an optimizer names twice counts once
// (distinct_tensors.h). An example is a tied parameter, which LibTorch's
// module->parameters() names twice and Python's once.
//
// Gradients may be on several devices and of several dtypes. They may be sparse
// (COO) if the order of the norm is positive: then their values count, added up
// where an index repeats. Gradients that were scaled by a GradScaler must be
// unscaled first.
//
// LibTorch's own torch::nn::utils functions are not used: they return a double,
// for which they wait for the device, know no order below 0, and understand
// order 0 differently from Python.
//
// Errors. std::invalid_argument for a bound that is negative or NaN, for an
// order that is NaN, for a sparse gradient with an order that is not positive,
// for order 0 if ranks hold parts of gradients (order 0 counts gradients), and
// for a sharded optimizer whose parameters are parts already; whatever
// gradient_shards() throws;
// c10::DistBackendError if ranks cannot agree.
namespace lockstep {

// Returns the norm of all `tensors`, which are gradients, as if they were one
// vector, and communicates nothing: the norm of order `norm_type` (infinity:
// the largest absolute value) of the tensors' own norms of that order. The
// result is 0-dimensional, on the first tensor's device, in the dtype that the
// tensors' dtypes promote to; it is 0 for an empty list. Waits for the device
// only with `error_if_nonfinite`, which throws std::runtime_error if the norm
// is NaN or infinite. Not differentiated.
at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0,
                          bool error_if_nonfinite = false);

// Returns the same norm for the optimizer's gradients. If ranks hold parts of
// them, the call is collective, and the result is float64 on its first
// parameter's device; with `error_if_nonfinite` all ranks throw if the norm is
// not finite.
at::Tensor get_total_norm(torch::optim::Optimizer& optimizer,
                          double norm_type = 2.0,
                          bool error_if_nonfinite = false);

// Scales all gradients by the one factor max_norm / (total_norm + 1e-6), unless
// that is above 1. If the norm is infinite, finite elements become 0 and
// infinite ones NaN; if it is NaN, all become NaN. Nothing is communicated.
void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                           const at::Tensor& total_norm);
void clip_grads_with_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           const at::Tensor& total_norm);

// Clips as above and returns the norm that the gradients had before, which is
// that of the whole model if ranks hold parts of it. If
// `error_if_nonfinite` throws, the gradients are unchanged. Throws
// std::invalid_argument for torch::optim::LBFGS if ranks hold parts of its
// parameters, whose step would be wrong (FullyShard).
at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                           double norm_type = 2.0,
                           bool error_if_nonfinite = false);
at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           double norm_type = 2.0,
                           bool error_if_nonfinite = false);

// Clamps each element of the gradients to [-clip_value, clip_value]; NaN stays
// NaN. Nothing is communicated. A sparse gradient becomes coalesced.
void clip_grad_value_(at::TensorList parameters, double clip_value);
void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value);

}  // namespace lockstep
