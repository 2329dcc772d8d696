#include "lockstep/amp/optimizer_gradients.h"

#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/gradient_shards.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

// Whether other ranks have other elements of the parameter.
bool is_divided(const at::Tensor& parameter) {
  const auto* layout = layout_of(parameter);
  return layout != nullptr &&
         std::ranges::any_of(layout->groups, [](const auto& group) {
           return group->size() > 1;
         });
}

}  // namespace

OptimizerGradients gradients_of(at::TensorList parameters) {
  OptimizerGradients result;
  result.layouts = LayoutGroups(parameters);
  if (!parameters.empty()) result.device = parameters.front().device();
  for (const auto& parameter : distinct(parameters.vec())) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    result.tensors.push_back(gradient);
    const double share = result.layouts.share_of(parameter);
    if (share > 0 && gradient.numel() > 0) {
      result.counted[share].push_back(gradient);
    }
  }
  // Two parameters may have one gradient.
  result.tensors = distinct(std::move(result.tensors));
  for (auto& [share, tensors] : result.counted) {
    tensors = distinct(std::move(tensors));
  }
  return result;
}

OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& param_group : optimizer.param_groups()) {
    const auto& more = param_group.params();
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr &&
      std::ranges::any_of(parameters, &is_divided)) {
    throw std::invalid_argument(
        "LBFGS works on all elements of the parameters as one vector, but this "
        "rank has a part of them only, so each rank would step in another "
        "direction; use an optimizer that steps each element by itself, such "
        "as SGD or AdamW, or do not divide the parameters");
  }
  auto* shards = dynamic_cast<GradientShards*>(&optimizer);
  if (shards == nullptr) return gradients_of(parameters);
  OptimizerGradients result;
  result.layouts = LayoutGroups(parameters);
  if (!parameters.empty()) result.device = parameters.front().device();
  result.shard_group = shards->shard_group();
  if (result.shard_group == nullptr) {
    throw std::invalid_argument(
        "The sharded optimizer's shard_group() is null, so its ranks cannot "
        "agree about their gradients. shard_group() must return the group "
        "that the optimizer was made with.");
  }
  result.tensors = shards->gradient_shards();
  std::erase_if(result.tensors,
                [](const at::Tensor& part) { return part.numel() == 0; });
  result.counted[1] = result.tensors;
  return result;
}

at::Tensor agreed(const at::Tensor& numbers, ReduceOp op,
                  const ProcessGroupPtr& group) {
  auto device = inside(group).has_backend(numbers.device().type())
                    ? numbers.device()
                    : group->control_device();
  auto shared = numbers.to(device);
  all_reduce(shared, {.op = std::move(op), .group = group});
  return shared.to(numbers.device());
}

}  // namespace lockstep::internal
