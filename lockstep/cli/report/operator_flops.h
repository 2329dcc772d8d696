#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// An operator's inputs, as a trace has them ("Input Dims" and "Concrete
// Inputs" of Kineto): the sizes of each tensor, and the text of each other
// value, in the order of the operator's arguments.
struct OperatorInputs {
  std::vector<std::vector<double>> sizes{};
  std::vector<std::string> values{};
};

// Returns the floating-point operations of a matrix product (aten::mm, addmm,
// bmm, baddbmm) or of a convolution and its backward (aten::convolution,
// convolution_backward), counting a multiplication and an addition as two.
// Returns 0 for other operators, and if the inputs do not tell.
double operator_flops(std::string_view name, const OperatorInputs& inputs);

// Whether operator_flops() counts operators of this name as convolutions.
bool is_convolution(std::string_view name);

}  // namespace lockstep::internal
