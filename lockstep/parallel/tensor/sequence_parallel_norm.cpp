#include "lockstep/parallel/tensor/sequence_parallel_norm.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <sstream>
#include <tuple>

#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::nn {
namespace {

constexpr double kLayerNormEps = 1e-5;

void print_norm(std::ostream& stream, const char* name,
                const std::vector<int64_t>& shape,
                const SequenceParallelNormOptions& options) {
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << std::boolalpha << "lockstep::nn::" << name << '('
       << at::IntArrayRef(shape) << ", eps=";
  if (options.eps) {
    text << *options.eps;
  } else {
    text << "None";
  }
  text << ", elementwise_affine=" << options.elementwise_affine << ')';
  stream << text.str();
}

}  // namespace

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(
    int64_t features, const SequenceParallelNormOptions& given)
    : options(given), normalized_shape{features} {
  SequenceParallelLayerNormImpl::reset();
}

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(
    const torch::nn::LayerNorm& plain, const SequenceParallelNormOptions& given)
    : options(given), normalized_shape(plain->options.normalized_shape()) {
  group_ = internal::tensor_group(options.group);
  options.eps = plain->options.eps();
  options.elementwise_affine = plain->options.elementwise_affine();
  weight = internal::whole_parameter(plain->weight);
  bias = internal::whole_parameter(plain->bias);
  register_parameter("weight", weight,
                     weight.defined() && weight.requires_grad());
  register_parameter("bias", bias, bias.defined() && bias.requires_grad());
}

void SequenceParallelLayerNormImpl::reset() {
  group_ = internal::tensor_group(options.group);
  const bool affine = options.elementwise_affine;
  weight = affine ? at::ones(normalized_shape) : at::Tensor();
  bias = affine ? at::zeros(normalized_shape) : at::Tensor();
  register_parameter("weight", weight, affine);
  register_parameter("bias", bias, affine);
}

void SequenceParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  print_norm(stream, "SequenceParallelLayerNorm", normalized_shape, options);
}

at::Tensor SequenceParallelLayerNormImpl::forward(const at::Tensor& input) {
  auto scale = weight;
  auto shift = bias;
  if (group_) {
    std::tie(scale, shift) = internal::copy_both(weight, bias, group_);
  }
  return at::layer_norm(input, normalized_shape, scale, shift,
                        options.eps.value_or(kLayerNormEps));
}

SequenceParallelRMSNormImpl::SequenceParallelRMSNormImpl(
    int64_t features, const SequenceParallelNormOptions& given)
    : options(given), normalized_shape{features} {
  SequenceParallelRMSNormImpl::reset();
}

void SequenceParallelRMSNormImpl::reset() {
  group_ = internal::tensor_group(options.group);
  const bool affine = options.elementwise_affine;
  weight = affine ? at::ones(normalized_shape) : at::Tensor();
  register_parameter("weight", weight, affine);
}

void SequenceParallelRMSNormImpl::pretty_print(std::ostream& stream) const {
  print_norm(stream, "SequenceParallelRMSNorm", normalized_shape, options);
}

at::Tensor SequenceParallelRMSNormImpl::forward(const at::Tensor& input) {
  auto scale = weight;
  if (group_) {
    std::tie(scale, std::ignore) = internal::copy_both(weight, {}, group_);
  }
  return at::rms_norm(input, normalized_shape,
                      scale.defined() ? std::optional(scale) : std::nullopt,
                      options.eps);
}

}  // namespace lockstep::nn
