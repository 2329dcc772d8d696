#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "tests/parallel/fuzz/case.h"
#include "tests/parallel/fuzz/module.h"

namespace lockstep::internal::fuzz {

// A module in DistributedDataParallel, whatever type its forward returns.
class Wrapped {
 public:
  virtual ~Wrapped() = default;

  virtual std::vector<Output> forward(const torch::Tensor& x, const Call& call,
                                      bool synchronises) = 0;
  virtual std::shared_ptr<Net> net() const = 0;
  // Makes the optimizer of a case whose wrapper takes part in stepping; returns
  // null if optimizers step in backward.
  virtual std::unique_ptr<torch::optim::Optimizer> make_optimizer() = 0;
  // Waits until the parameters shared between ranks are stepped.
  virtual void synchronize(torch::optim::Optimizer& optimizer) = 0;
};

std::unique_ptr<Wrapped> wrap(const Case& fuzz_case, int wrapper,
                              const std::vector<torch::Tensor>& tensors);

}  // namespace lockstep::internal::fuzz
