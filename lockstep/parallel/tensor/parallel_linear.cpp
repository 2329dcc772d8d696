#include "lockstep/parallel/tensor/parallel_linear.h"

#include <ATen/ops/linear.h>

#include <sstream>
#include <stdexcept>

#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::nn {

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    int64_t inputs, int64_t outputs, const ColumnParallelLinearOptions& given)
    : options(given), in_features(inputs), out_features(outputs) {
  check_options();
  ColumnParallelLinearImpl::reset();
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    const torch::nn::Linear& whole, const ColumnParallelLinearOptions& given)
    : ColumnParallelLinearImpl(whole->weight, whole->bias, given) {}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    const at::Tensor& whole_weight, const at::Tensor& whole_bias,
    const ColumnParallelLinearOptions& given)
    : options(given),
      in_features(whole_weight.size(1)),
      out_features(whole_weight.size(0)) {
  check_options();
  options.bias = whole_bias.defined();
  take_parts(whole_weight, whole_bias);
}

void ColumnParallelLinearImpl::check_options() const {
  if (options.sequence_parallel && !options.reduce_input_gradient) {
    throw std::invalid_argument(
        "ColumnParallelLinear: reduce_input_gradient is false with "
        "sequence_parallel, which gathers the input and so adds up its "
        "gradients; gather the input yourself, with all_gather_sequence(), and "
        "leave sequence_parallel false");
  }
}

void ColumnParallelLinearImpl::reset() {
  torch::nn::Linear whole(
      torch::nn::LinearOptions(in_features, out_features).bias(options.bias));
  take_parts(whole->weight, whole->bias);
}

void ColumnParallelLinearImpl::take_parts(const at::Tensor& whole_weight,
                                          const at::Tensor& whole_bias) {
  group_ = internal::tensor_group(options.group);
  weight = internal::part_of_parameter(whole_weight, 0, group_);
  bias = internal::part_of_parameter(whole_bias, 0, group_);
  register_parameter("weight", weight, weight.requires_grad());
  register_parameter("bias", bias, bias.defined() && bias.requires_grad());
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << std::boolalpha
       << "lockstep::nn::ColumnParallelLinear(in_features=" << in_features
       << ", out_features=" << weight.size(0) << " of " << out_features
       << ", bias=" << options.bias << ')';
  stream << text.str();
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  if (input.dim() == 0 || input.size(-1) != in_features) {
    throw std::invalid_argument(
        c10::str("ColumnParallelLinear: the input has the shape ",
                 input.sizes(), ", but in_features is ", in_features,
                 "; its last dimension must have as many"));
  }
  if (!group_) return at::linear(input, weight, bias);
  at::Tensor whole = input;
  if (options.sequence_parallel) {
    whole = all_gather_sequence(input, options.sequence_dim, group_);
  } else if (options.reduce_input_gradient) {
    whole = copy_to_tensor_group(input, group_);
  }
  auto output = at::linear(whole, weight, bias);
  if (!options.gather_output) return output;
  return gather_from_tensor_group(output, -1, group_, out_features);
}

RowParallelLinearImpl::RowParallelLinearImpl(
    int64_t inputs, int64_t outputs, const RowParallelLinearOptions& given)
    : options(given), in_features(inputs), out_features(outputs) {
  RowParallelLinearImpl::reset();
}

RowParallelLinearImpl::RowParallelLinearImpl(
    const torch::nn::Linear& whole, const RowParallelLinearOptions& given)
    : options(given),
      in_features(whole->options.in_features()),
      out_features(whole->options.out_features()) {
  options.bias = whole->bias.defined();
  take_parts(whole->weight, whole->bias);
}

void RowParallelLinearImpl::reset() {
  torch::nn::Linear whole(
      torch::nn::LinearOptions(in_features, out_features).bias(options.bias));
  take_parts(whole->weight, whole->bias);
}

void RowParallelLinearImpl::take_parts(const at::Tensor& whole_weight,
                                       const at::Tensor& whole_bias) {
  group_ = internal::tensor_group(options.group);
  weight = internal::part_of_parameter(whole_weight, 1, group_);
  bias = internal::whole_parameter(whole_bias);
  register_parameter("weight", weight, weight.requires_grad());
  register_parameter("bias", bias, bias.defined() && bias.requires_grad());
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  std::ostringstream text;  // keeps the flags of `stream` as they are
  text << std::boolalpha
       << "lockstep::nn::RowParallelLinear(in_features=" << weight.size(1)
       << " of " << in_features << ", out_features=" << out_features
       << ", bias=" << options.bias << ')';
  stream << text.str();
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const int64_t expected =
      options.input_is_parallel ? weight.size(1) : in_features;
  if (input.dim() == 0 || input.size(-1) != expected) {
    throw std::invalid_argument(
        c10::str("RowParallelLinear: the input has the shape ", input.sizes(),
                 ", but its last dimension must have ", expected, " of ",
                 in_features, " features, as input_is_parallel is ",
                 options.input_is_parallel ? "true" : "false"));
  }
  if (!group_) return at::linear(input, weight, bias);
  auto part = options.input_is_parallel
                  ? input
                  : scatter_to_tensor_group(input, -1, group_);
  // Backward of a product does not use its result, so that the sum may replace
  // it.
  auto term = at::linear(part, weight);
  if (!options.sequence_parallel) {
    auto output = term.is_contiguous() && !term.is_view()
                      ? internal::reduce_in_place(term, group_)
                      : reduce_from_tensor_group(term, group_);
    if (bias.defined()) output.add_(bias);
    return output;
  }
  auto output = reduce_scatter_sequence(term, options.sequence_dim, group_);
  // Each rank adds it to its part of the sequence, so that the gradient is a
  // term of the sum.
  if (bias.defined()) output.add_(copy_to_tensor_group(bias, group_));
  return output;
}

}  // namespace lockstep::nn
