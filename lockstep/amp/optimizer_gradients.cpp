#include "lockstep/amp/optimizer_gradients.h"

#include <ATen/ATen.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <stdexcept>
#include <string>
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

// More than any chain of groups that wait for each other is long: the axes of a
// mesh.
constexpr int kMostPasses = 64;

// Any order will do that is the same on all ranks. This one orders numbers
// ("2", "10") by their values.
bool comes_first(const std::string& a, const std::string& b) {
  return std::pair(a.size(), a) < std::pair(b.size(), b);
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

std::vector<std::vector<at::Tensor>> by_device_and_dtype(
    const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& tensor : tensors) {
    const auto same = std::ranges::find_if(groups, [&](const auto& group) {
      return group.front().device() == tensor.device() &&
             group.front().scalar_type() == tensor.scalar_type();
    });
    if (same == groups.end()) {
      groups.push_back({tensor});
    } else {
      same->push_back(tensor);
    }
  }
  return groups;
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

LayoutGroups::LayoutGroups(at::TensorList parameters) {
  for (const auto& parameter : parameters) {
    const auto* layout = layout_of(parameter);
    if (layout == nullptr) continue;
    any_ = true;
    std::vector<const ProcessGroup*> inner;
    for (auto it = layout->groups.rbegin(); it != layout->groups.rend(); ++it) {
      const auto& group = *it;
      if (group->size() == 1) continue;
      auto entry = std::ranges::find(entries_, group, &Entry::group);
      if (entry == entries_.end()) {
        entry = entries_.insert(entry, {group, {}});
      }
      for (const auto* other : inner) {
        if (std::ranges::find(entry->inner, other) == entry->inner.end()) {
          entry->inner.push_back(other);
        }
      }
      inner.push_back(group.get());
    }
  }
  std::ranges::sort(entries_, comes_first,
                    [](const Entry& entry) { return entry.group->name(); });
}

double LayoutGroups::share_of(const at::Tensor& parameter) const {
  const auto* layout = layout_of(parameter);
  if (layout != nullptr && layout->duplicate) return 0;
  double share = 1;
  for (const auto& entry : entries_) {
    const bool divides =
        layout != nullptr &&
        std::ranges::find(layout->groups, entry.group) != layout->groups.end();
    if (!divides) share /= entry.group->size();
  }
  return share;
}

at::Tensor LayoutGroups::reduced(const at::Tensor& numbers,
                                 const ReduceOp& op) const {
  auto result = numbers;
  std::vector<const Entry*> open;
  for (const auto& entry : entries_) open.push_back(&entry);
  for (int pass = 0; !open.empty(); ++pass) {
    if (pass == kMostPasses) {
      throw std::invalid_argument(
          "The layouts of the parameters list the group " +
          open.front()->group->name() +
          " and others in orders that contradict each other, on this rank or "
          "another. Each layout must list its groups from the outermost (a "
          "pipeline's) to the innermost.");
    }
    for (auto it = open.begin(); it != open.end();) {
      const Entry& entry = **it;
      const bool waits = std::ranges::any_of(open, [&](const Entry* other) {
        return std::ranges::find(entry.inner, other->group.get()) !=
               entry.inner.end();
      });
      const auto flag = at::full({1}, waits ? 1 : 0, result.options());
      const auto all = agreed(at::cat({result, flag}), op, entry.group);
      if (all[result.numel()].item<double>() > 0) {
        ++it;
        continue;
      }
      result = all.slice(0, 0, result.numel());
      it = open.erase(it);
    }
  }
  return result;
}

}  // namespace lockstep::internal
