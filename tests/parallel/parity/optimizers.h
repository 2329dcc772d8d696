#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/parallel/parity/cases.h"
#include "tests/parallel/parity/models.h"

namespace lockstep::internal::testing {

using ParallelModel = DistributedDataParallel<std::shared_ptr<ParityModel>>;

// Makes the optimizer of test.optimizer and test.zero over all parameters of
// `model`. Collective if it is sharded.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Case& test,
                                                        ParallelModel& model);

}  // namespace lockstep::internal::testing
