#include "lockstep/cli/report/operator_flops.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace lockstep::internal {
namespace {

using Sizes = std::vector<double>;

double product_of(const Sizes& sizes, size_t first = 0) {
  double product = 1;
  for (size_t i = first; i < sizes.size(); ++i) product *= sizes[i];
  return product;
}

// Returns the numbers in a text such as "[2, 2]".
Sizes numbers_in(const std::string& text) {
  Sizes numbers;
  for (size_t at = 0;
       (at = text.find_first_of("0123456789", at)) != text.npos;) {
    char* end = nullptr;
    numbers.push_back(std::strtod(text.c_str() + at, &end));
    at = static_cast<size_t>(end - text.c_str());
  }
  return numbers;
}

double product_flops(bool is_added, const std::vector<Sizes>& sizes) {
  const size_t left = is_added ? 1 : 0;
  if (sizes.size() < left + 2) return 0;
  const Sizes& a = sizes[left];
  const Sizes& b = sizes[left + 1];
  if (a.size() != b.size() || a.size() < 2 || a.size() > 3) return 0;
  return 2 * b.back() * product_of(a);
}

// Each place of the output, or if it is transposed of the input, meets each
// weight of its group once.
double one_convolution(const Sizes& places, const Sizes& weight) {
  return 2 * product_of(places) * product_of(weight, 1);
}

// aten::convolution(input, weight, bias, stride, padding, dilation, transposed,
// output_padding, groups).
double convolution_flops(const OperatorInputs& inputs) {
  if (inputs.sizes.size() < 2 || inputs.values.size() < 7) return 0;
  const Sizes& input = inputs.sizes[0];
  const Sizes& weight = inputs.sizes[1];
  if (input.size() < 3 || weight.size() != input.size()) return 0;
  if (inputs.values[6] == "True") return one_convolution(input, weight);
  const auto per_dimension = [&](size_t argument) {
    Sizes numbers = numbers_in(inputs.values[argument]);
    // One number stands for all dimensions.
    if (numbers.size() == 1) numbers.resize(input.size() - 2, numbers[0]);
    return numbers;
  };
  const Sizes stride = per_dimension(3);
  const Sizes padding = per_dimension(4);
  const Sizes dilation = per_dimension(5);
  Sizes output{input[0], weight[0]};
  for (size_t i = 2; i < input.size(); ++i) {
    const size_t at = i - 2;
    if (at >= std::min({stride.size(), padding.size(), dilation.size()}) ||
        stride[at] == 0) {
      return 0;
    }
    output.push_back(std::floor((input[i] + 2 * padding[at] -
                                 dilation[at] * (weight[i] - 1) - 1) /
                                stride[at]) +
                     1);
  }
  return one_convolution(output, weight);
}

// aten::convolution_backward(grad_output, input, weight, bias_sizes, stride,
// padding, dilation, transposed, output_padding, groups, output_mask): the
// gradients of the input and of the weight, if they are wanted, cost as much as
// the convolution each.
double backward_flops(const OperatorInputs& inputs) {
  if (inputs.sizes.size() < 3 || inputs.values.size() < 11) return 0;
  const Sizes& weight = inputs.sizes[2];
  if (weight.size() < 3) return 0;
  const std::string& mask = inputs.values[10];
  const size_t second = mask.find(',');
  if (second == mask.npos) return 0;
  const bool of_input = mask.find("True") < second;
  const bool of_weight = mask.find("True", second) < mask.find(',', second + 1);
  const bool is_transposed = inputs.values[7] == "True";
  return (of_input + of_weight) *
         one_convolution(inputs.sizes[is_transposed ? 1 : 0], weight);
}

}  // namespace

double operator_flops(std::string_view name, const OperatorInputs& inputs) {
  if (name == "aten::mm" || name == "aten::bmm") {
    return product_flops(false, inputs.sizes);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return product_flops(true, inputs.sizes);
  }
  if (name == "aten::convolution") return convolution_flops(inputs);
  if (name == "aten::convolution_backward") return backward_flops(inputs);
  return 0;
}

bool is_convolution(std::string_view name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

}  // namespace lockstep::internal
