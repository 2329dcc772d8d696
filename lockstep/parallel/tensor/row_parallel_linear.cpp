#include "lockstep/parallel/tensor/row_parallel_linear.h"

#include <ATen/ops/linear.h>

#include <sstream>
#include <stdexcept>

#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_functions.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::nn {

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
