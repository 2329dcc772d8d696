#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>

#include "tests/parallel/fuzz/programs/program.h"
#include "tests/parallel/fuzz/programs/program_net.h"

namespace lockstep::internal::fuzz {

// The objects that a program trains on a rank: model, wrapper and optimizer.
class Trained {
 public:
  virtual ~Trained() = default;

  virtual at::Tensor forward(Idiom idiom, at::Tensor& x, const Batch& batch,
                             Variables& variables) = 0;
  // Makes forward and backward of a pipeline. Returns the loss on the last
  // stage's rank.
  virtual at::Tensor train(const at::Tensor& /*x*/,
                           const at::Tensor& /*target*/) {
    return {};
  }
  // That of the model, if it has one.
  virtual void zero_grad(bool set_to_none) {
    optimizer_->zero_grad(set_to_none);
  }
  virtual void without_sync(const std::function<void()>& body) = 0;
  virtual void join(const std::function<void()>& /*body*/) {}
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;
  torch::optim::Optimizer& optimizer() const { return *optimizer_; }
  // Waits until parameters that ranks share are stepped.
  virtual void synchronize() {}

 protected:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// `values`: the seed of the parameters. Collective.
std::unique_ptr<Trained> make_trained(const Program& program, uint64_t values);

}  // namespace lockstep::internal::fuzz
