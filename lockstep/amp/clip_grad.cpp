#include "lockstep/amp/clip_grad.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/amp/optimizer_gradients.h"
#include "lockstep/comm/distinct_tensors.h"

namespace lockstep {

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_bound(const char* function, const char* name, double bound) {
  if (bound >= 0) return;
  throw std::invalid_argument(std::string(function) + ": " + name + " is " +
                              std::to_string(bound) +
                              "; it must be 0 or greater.");
}

void check_norm_type(double norm_type) {
  if (!std::isnan(norm_type)) return;
  throw std::invalid_argument(
      "get_total_norm: norm_type is NaN; give the order of a norm: 1, 2, "
      "infinity or any other number.");
}

// Returns a sparse tensor's values, added up where an index repeats, as a
// tensor of their own; returns a dense tensor as it is.
at::Tensor summed_values(const at::Tensor& tensor, double norm_type) {
  if (!tensor.is_sparse()) return tensor;
  if (norm_type > 0) return tensor.coalesce()._values();
  throw std::invalid_argument(
      "get_total_norm: a norm of order " + std::to_string(norm_type) +
      " depends on zeros, which a sparse gradient does not store. Use an order "
      "above 0, or to_dense() gradients.");
}

// Returns each tensor's norm. If `widened`, tensors of 16-bit floats are
// summed, and their norms returned, in float32.
Tensors norms_of(const Tensors& tensors, double norm_type, bool widened) {
  Tensors dense;
  for (const auto& tensor : tensors) {
    dense.push_back(summed_values(tensor, norm_type));
  }
  Tensors result;
  for (const auto& alike : internal::by_device_and_dtype(dense)) {
    auto dtype = alike.front().scalar_type();
    std::optional<c10::ScalarType> wide;
    if (widened && (dtype == at::kHalf || dtype == at::kBFloat16)) {
      wide = at::kFloat;
    }
    for (auto& norm : at::_foreach_norm(alike, norm_type, wide)) {
      result.push_back(std::move(norm));
    }
  }
  return result;
}

void check_finite(const at::Tensor& total_norm, double norm_type) {
  double number = total_norm.item<double>();
  if (std::isfinite(number)) return;
  throw std::runtime_error(
      "The total norm of order " + std::to_string(norm_type) +
      " of the gradients is " + std::to_string(number) +
      ", so they cannot be clipped. Pass error_if_nonfinite = false to scale "
      "them by this norm all the same.");
}

// Returns the reduction over the ranks that hold other parts.
at::Tensor reduced(const at::Tensor& numbers, const ReduceOp& op,
                   const internal::OptimizerGradients& gradients) {
  return gradients.shard_group != nullptr
             ? internal::agreed(numbers, op, gradients.shard_group)
             : gradients.layouts.reduced(numbers, op);
}

at::Tensor largest_over_ranks(const at::Tensor& local,
                              const internal::OptimizerGradients& gradients) {
  // Backends differ in what MAX does with NaN, so NaN travels as a number.
  auto is_nan = local.isnan();
  auto numbers = at::stack(
      {local.nan_to_num(0, kInfinity, -kInfinity), is_nan.to(at::kDouble)});
  numbers = reduced(numbers, ReduceOp::MAX, gradients);
  return at::where(numbers[1] > 0, at::full_like(numbers[0], NAN), numbers[0]);
}

// The norm of the gradients of which ranks have parts.
at::Tensor divided_norm(const internal::OptimizerGradients& gradients,
                        double norm_type) {
  const bool sharded = gradients.shard_group != nullptr;
  if (norm_type == 0) {
    throw std::invalid_argument(
        std::string("get_total_norm: norm_type 0 counts the gradients that are "
                    "not zero, and ") +
        (sharded ? "a sharded optimizer's ranks hold parts of gradients. Use "
                   "another order, or the parameters of an optimizer that is "
                   "not sharded."
                 : "these parameters are divided over ranks, which hold parts "
                   "of gradients. Use another order."));
  }
  if (sharded && gradients.layouts.any()) {
    throw std::invalid_argument(
        "get_total_norm: the optimizer is sharded, and its parameters are "
        "already parts of larger ones (by tensor parallelism, a pipeline or "
        "FSDP); the norm of such parts of parts is not computed. Use an "
        "optimizer that is not sharded.");
  }
  auto like = at::TensorOptions().device(gradients.device).dtype(at::kDouble);
  // The sum is in float64, in which the square of a float32 neither overflows
  // nor vanishes.
  auto sum = at::zeros({}, like);
  Tensors all;
  for (const auto& [share, tensors] : gradients.counted) {
    Tensors norms;
    for (const auto& norm : norms_of(tensors, norm_type, /*widened=*/true)) {
      norms.push_back(norm.to(gradients.device, at::kDouble));
    }
    if (norms.empty()) continue;
    all.push_back(at::stack(norms));
    if (std::isfinite(norm_type)) {
      sum += all.back().pow(norm_type).sum() * share;
    }
  }
  if (norm_type == kInfinity) {
    return largest_over_ranks(
        all.empty() ? at::zeros({}, like) : at::cat(all).max(), gradients);
  }
  if (norm_type == -kInfinity) {
    auto least =
        all.empty() ? at::full({}, kInfinity, like) : at::cat(all).min();
    return -largest_over_ranks(-least, gradients);
  }
  return reduced(sum.view({1}), ReduceOp::SUM, gradients)[0].pow(1 / norm_type);
}

void scale_to_norm(const Tensors& gradients, double max_norm,
                   const at::Tensor& total_norm) {
  check_bound("clip_grad_norm_", "max_norm", max_norm);
  // The factor is clamped, not compared with 1: a comparison would wait for the
  // device. Python multiplies by the reciprocal, which rounds differently from
  // `/`, so this does the same.
  auto factor = ((total_norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0);
  Tensors dense;
  for (const auto& gradient : gradients) {
    dense.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  for (const auto& alike : internal::by_device_and_dtype(dense)) {
    at::_foreach_mul_(alike, factor.to(alike.front().device()));
  }
}

void clip_values(const Tensors& gradients, double clip_value) {
  check_bound("clip_grad_value_", "clip_value", clip_value);
  const at::NoGradGuard no_grad;
  Tensors dense;
  for (const auto& gradient : gradients) {
    if (gradient.is_sparse()) {
      if (!gradient.is_coalesced()) gradient.copy_(gradient.coalesce());
      dense.push_back(gradient._values());
    } else {
      dense.push_back(gradient);
    }
  }
  for (const auto& alike : internal::by_device_and_dtype(dense)) {
    at::_foreach_clamp_min_(alike, -clip_value);
    at::_foreach_clamp_max_(alike, clip_value);
  }
}

at::Tensor total_norm_of(const internal::OptimizerGradients& gradients,
                         double norm_type, bool error_if_nonfinite) {
  if (gradients.shard_group == nullptr && !gradients.layouts.any()) {
    return get_total_norm(gradients.tensors, norm_type, error_if_nonfinite);
  }
  check_norm_type(norm_type);
  const at::NoGradGuard no_grad;
  auto total_norm = divided_norm(gradients, norm_type);
  if (error_if_nonfinite) check_finite(total_norm, norm_type);
  return total_norm;
}

}  // namespace

at::Tensor get_total_norm(at::TensorList tensors, double norm_type,
                          bool error_if_nonfinite) {
  check_norm_type(norm_type);
  if (tensors.empty()) return at::zeros({});
  const at::NoGradGuard no_grad;
  auto norms = norms_of(distinct(tensors.vec()), norm_type, /*widened=*/false);
  // at::stack() takes several dtypes, but not several devices.
  auto device = tensors.front().device();
  for (auto& norm : norms) norm = norm.to(device);
  auto total_norm = at::linalg_vector_norm(at::stack(norms), norm_type);
  if (error_if_nonfinite) check_finite(total_norm, norm_type);
  return total_norm;
}

at::Tensor get_total_norm(torch::optim::Optimizer& optimizer, double norm_type,
                          bool error_if_nonfinite) {
  return total_norm_of(internal::gradients_of(optimizer), norm_type,
                       error_if_nonfinite);
}

void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                           const at::Tensor& total_norm) {
  const at::NoGradGuard no_grad;
  scale_to_norm(internal::gradients_of(parameters).tensors, max_norm,
                total_norm);
}

void clip_grads_with_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           const at::Tensor& total_norm) {
  const at::NoGradGuard no_grad;
  scale_to_norm(internal::gradients_of(optimizer).tensors, max_norm,
                total_norm);
}

at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                           double norm_type, bool error_if_nonfinite) {
  check_bound("clip_grad_norm_", "max_norm", max_norm);
  const at::NoGradGuard no_grad;
  auto gradients = internal::gradients_of(parameters);
  auto total_norm = total_norm_of(gradients, norm_type, error_if_nonfinite);
  scale_to_norm(gradients.tensors, max_norm, total_norm);
  return total_norm;
}

at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                           double norm_type, bool error_if_nonfinite) {
  check_bound("clip_grad_norm_", "max_norm", max_norm);
  const at::NoGradGuard no_grad;
  auto gradients = internal::gradients_of(optimizer);
  auto total_norm = total_norm_of(gradients, norm_type, error_if_nonfinite);
  scale_to_norm(gradients.tensors, max_norm, total_norm);
  return total_norm;
}

void clip_grad_value_(at::TensorList parameters, double clip_value) {
  clip_values(internal::gradients_of(parameters).tensors, clip_value);
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  clip_values(internal::gradients_of(optimizer).tensors, clip_value);
}

}  // namespace lockstep
