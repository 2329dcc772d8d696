#include "lockstep/parallel/module/result_alias.h"

#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::internal {
namespace {

struct ResultAlias : torch::autograd::Function<ResultAlias> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& result) {
    context->set_materialize_grads(false);
    return result.detach();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list gradients) {
    return gradients;
  }
};

}  // namespace

at::Tensor result_alias(const at::Tensor& result) {
  return ResultAlias::apply(result);
}

}  // namespace lockstep::internal
