#include "tests/parallel/parity/optimizers.h"

#include <stdexcept>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

namespace lockstep::internal::testing {
namespace {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

template <class Optimizer, class Options>
OptimizerPtr make(const Case& test, ParallelModel& model,
                  const Options& options) {
  using Sharded = ZeroRedundancyOptimizer<Optimizer>;
  if (test.zero.empty()) {
    return std::make_unique<Optimizer>(model->parameters(), options);
  }
  if (test.zero == "parameters") {
    return std::make_unique<Sharded>(model->parameters(), options);
  }
  ZeroRedundancyOptions sharding;
  sharding.shared_parameters = test.zero == "shared_parameters";
  return std::make_unique<Sharded>(model, options, sharding);
}

}  // namespace

// Sets all of Python's defaults, because LibTorch's may differ.
OptimizerPtr make_optimizer(const Case& test, ParallelModel& model) {
  double lr = test.lr();
  const std::string& name = test.optimizer;
  if (name == "sgd") {
    return make<torch::optim::SGD>(test, model, torch::optim::SGDOptions(lr));
  }
  if (name == "sgd_momentum") {
    return make<torch::optim::SGD>(test, model,
                                   torch::optim::SGDOptions(lr).momentum(0.9));
  }
  if (name == "adam") {
    return make<torch::optim::Adam>(test, model,
                                    torch::optim::AdamOptions(lr)
                                        .betas({0.9, 0.999})
                                        .eps(1e-8)
                                        .weight_decay(0));
  }
  if (name == "adamw") {
    return make<torch::optim::AdamW>(test, model,
                                     torch::optim::AdamWOptions(lr)
                                         .betas({0.9, 0.999})
                                         .eps(1e-8)
                                         .weight_decay(1e-2));
  }
  if (name == "fused_sgd_momentum") {
    return make<optim::SGD>(test, model,
                            optim::SGDOptions{.lr = lr, .momentum = 0.9});
  }
  if (name == "fused_adam") {
    return make<optim::Adam>(test, model, optim::AdamOptions{.lr = lr});
  }
  if (name == "fused_adamw") {
    return make<optim::AdamW>(test, model, optim::AdamWOptions{.lr = lr});
  }
  throw std::invalid_argument("no parity optimizer '" + name + "'");
}

}  // namespace lockstep::internal::testing
