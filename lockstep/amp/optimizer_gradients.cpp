#include "lockstep/amp/optimizer_gradients.h"

#include <stdexcept>
#include <utility>

#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/gradient_shards.h"
#include "lockstep/comm/reductions.h"

namespace lockstep::internal {

OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer) {
  OptimizerGradients result;
  bool first = true;
  auto* shards = dynamic_cast<GradientShards*>(&optimizer);
  for (const auto& param_group : optimizer.param_groups()) {
    for (const auto& parameter : param_group.params()) {
      if (first) result.device = parameter.device();
      first = false;
      if (shards == nullptr && parameter.grad().defined()) {
        result.tensors.push_back(parameter.grad());
      }
    }
  }
  result.tensors = distinct(std::move(result.tensors));
  if (shards != nullptr) {
    result.shard_group = shards->shard_group();
    if (result.shard_group == nullptr) {
      throw std::invalid_argument(
          "The sharded optimizer's shard_group() is null, so its ranks cannot "
          "agree about their gradients. shard_group() must return the group "
          "that the optimizer was made with.");
    }
    result.tensors = shards->gradient_shards();
    // Some norms are not defined for an empty tensor.
    std::erase_if(result.tensors,
                  [](const at::Tensor& part) { return part.numel() == 0; });
  }
  return result;
}

at::Tensor agreed(const at::Tensor& numbers, ReduceOp op,
                  const ProcessGroupPtr& group) {
  auto device = group->has_backend(numbers.device().type())
                    ? numbers.device()
                    : group->control_device();
  auto shared = numbers.to(device);
  all_reduce(shared, {.op = std::move(op), .group = group});
  return shared.to(numbers.device());
}

}  // namespace lockstep::internal
