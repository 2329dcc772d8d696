#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <vector>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// The exception that a case throws on purpose.
struct DeliberateError : std::runtime_error {
  DeliberateError() : std::runtime_error("the fuzzer's own exception") {}
};

// Returns the sizes of the parameters that an operation of `kind` takes.
std::vector<std::vector<int64_t>> sizes_for(OpKind kind, int64_t width);

// Computes the formula of `kind`. Only for operations that need no more than
// the activation and their parameters: all but embedding, running_mean,
// auxiliary_loss and returned_parameter.
torch::Tensor compute(OpKind kind, const torch::Tensor& x,
                      const std::vector<torch::Tensor>& parameters);

// Returns the formula as a line of C++, for variables with these names.
std::string text_of(OpKind kind, const std::vector<std::string>& names);

torch::Tensor activate(Activation activation, const torch::Tensor& x);

// Returns x; its backward throws a DeliberateError.
torch::Tensor throw_in_backward(const torch::Tensor& x);

}  // namespace lockstep::internal::fuzz
