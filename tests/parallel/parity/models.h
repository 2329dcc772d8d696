#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace lockstep::testing {

class ParityModel : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

// Of models.py, with the same parameters under the same names; what they hold
// at first is of no importance.
std::shared_ptr<ParityModel> make_model(const std::string& name);

// As models.py: mean squared error, or cross entropy where targets are classes.
at::Tensor loss_of(const at::Tensor& prediction, const at::Tensor& target);

}  // namespace lockstep::testing
