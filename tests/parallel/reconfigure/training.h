#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

// The trainings of parallel_reconfigure_rank.
namespace lockstep::internal::testing {

// The model and the optimizer of one rank. A training is the same each time it
// is made: it seeds the generators, and a step uses nothing random.
class Training {
 public:
  virtual ~Training() = default;
  // Forward and backward.
  virtual void compute(int step) = 0;
  virtual torch::optim::Optimizer& optimizer() = 0;
  // The parameters of this rank.
  virtual std::vector<at::Tensor> parameters() const = 0;
};

// Makes a training. The groups that it uses were made before.
using MakeTraining = std::function<std::unique_ptr<Training>()>;

// Each makes the groups of a training that is named KIND:REST, where KIND is
// that of the function. Collective.
MakeTraining zero_training(const std::string& rest);
MakeTraining pipeline_training(const std::string& rest);
MakeTraining tensor_training(const std::string& rest);

// Kills this process if it is to die now: `moment` is "forward", "backward" or
// another name that the plan of the test has.
void reach(const std::string& moment);

// Returns `tensor`, whose computation is the moment "forward", and that of its
// gradient the moment "backward".
at::Tensor reaching(const at::Tensor& tensor);

}  // namespace lockstep::internal::testing
