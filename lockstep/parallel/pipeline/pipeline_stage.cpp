#include "lockstep/parallel/pipeline/pipeline_stage.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A zero whose gradient is zero for each of some tensors.
struct ZeroOf : torch::autograd::Function<ZeroOf> {
  static at::Tensor forward(AutogradContext* context, at::TensorList tensors) {
    context->save_for_backward(tensors.vec());
    return at::zeros({}, tensors.front().options());
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& /*gradients*/) {
    variable_list zeros;
    for (const at::Tensor& tensor : context->get_saved_variables()) {
      zeros.push_back(at::zeros({}, tensor.options()).expand(tensor.sizes()));
    }
    return zeros;
  }
};

}  // namespace

void average_accumulated(DdpState& state, torch::nn::Module& module) {
  variable_list trained;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  if (trained.empty()) return;
  at::Tensor zero;
  {
    DdpState::ForwardPass pass(state);
    zero = ZeroOf::apply(at::TensorList(trained));
    pass.returns(zero);
  }
  zero.backward();
}

}  // namespace lockstep::internal
