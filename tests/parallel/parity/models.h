#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace lockstep::internal::testing {

class ParityModel : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

// Makes the model of that name in models.py, with the same parameters under the
// same names; their initial values do not matter.
std::shared_ptr<ParityModel> make_model(const std::string& name);

// Computes the loss as models.py does: mean squared error, or cross entropy if
// targets are classes.
at::Tensor loss_of(const at::Tensor& prediction, const at::Tensor& target);

}  // namespace lockstep::internal::testing
