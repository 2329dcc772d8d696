#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/parallel/module/forward_result.h"
#include "lockstep/parallel/pipeline/pipeline_failure.h"

namespace lockstep::internal {

// Calls forward with as many arguments as there are tensors.
template <typename Impl>
std::vector<at::Tensor> forward_tensors(Impl& module,
                                        const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> tensors;
  const auto take = [&tensors](auto&& result) {
    visit_tensors(result, [&tensors](const at::Tensor& tensor) {
      tensors.push_back(tensor);
    });
  };
  if constexpr (requires { module.forward(x[0]); }) {
    if (x.size() == 1) return take(module.forward(x[0])), tensors;
  }
  if constexpr (requires { module.forward(x[0], x[1]); }) {
    if (x.size() == 2) return take(module.forward(x[0], x[1])), tensors;
  }
  if constexpr (requires { module.forward(x[0], x[1], x[2]); }) {
    if (x.size() == 3) return take(module.forward(x[0], x[1], x[2])), tensors;
  }
  if constexpr (requires { module.forward(x[0], x[1], x[2], x[3]); }) {
    if (x.size() == 4) {
      return take(module.forward(x[0], x[1], x[2], x[3])), tensors;
    }
  }
  if constexpr (requires { module.forward(x); }) {
    return take(module.forward(x)), tensors;
  }
  throw StageMistake(
      "the stage before returned " + std::to_string(x.size()) +
      " tensors, and forward of " + module.name() +
      " does not take so many; a stage takes 1 to 4 tensors or a std::vector "
      "of them, by value or const reference, since what it wrote into a "
      "reference would be lost");
}

}  // namespace lockstep::internal
