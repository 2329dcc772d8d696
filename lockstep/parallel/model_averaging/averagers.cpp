#include "lockstep/parallel/model_averaging/averagers.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/state/state_tree.h"

namespace lockstep {
namespace {

void require_at_least(const char* name, int64_t given, int64_t lowest) {
  if (given >= lowest) return;
  throw std::invalid_argument(
      c10::str(name, " is ", given, "; give ", lowest, " or more steps"));
}

void append_with_gradient(at::TensorList params, std::vector<at::Tensor>& out) {
  for (const auto& parameter : params) {
    if (parameter.grad().defined()) out.push_back(parameter);
  }
}

void average_over(const ProcessGroupPtr& group,
                  const std::vector<at::Tensor>& parameters) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const auto& parameter : parameters) {
    internal::require_replica(
        parameter, *group, "ModelAverager",
        "give process_group the ranks that have the same part, or leave the "
        "parameter out");
    flat.push_back(parameter.reshape(-1));
  }
  // The result has the widest dtype of the parameters.
  auto all = at::cat(flat);
  all.div_(group->size());
  all_reduce(all, {.group = group});
  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    const auto count = parameter.numel();
    parameter.copy_(all.narrow(0, offset, count).view(parameter.sizes()));
    offset += count;
  }
}

// Splits `parent` into groups of `size` neighbours and returns this rank's.
ProcessGroupPtr neighbours(const ProcessGroupPtr& parent, int size) {
  std::vector<std::vector<int>> parts;
  for (int rank = 0; rank < parent->size(); ++rank) {
    if (rank % size == 0) parts.emplace_back();
    parts.back().push_back(rank);
  }
  return split_group(parts, {.parent = parent});
}

}  // namespace

void ModelAverager::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  step = internal::state_entry(state, "step", "ModelAverager");
}

void ModelAverager::average_parameters(at::TensorList params) {
  std::vector<at::Tensor> with_gradient;
  append_with_gradient(params, with_gradient);
  average(with_gradient);
}

void ModelAverager::average_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  std::vector<at::Tensor> with_gradient;
  for (const auto& group : param_groups) {
    append_with_gradient(group.params(), with_gradient);
  }
  average(with_gradient);
}

void ModelAverager::average(const std::vector<at::Tensor>& with_gradient) {
  const auto group = group_of_step();
  if (group && !with_gradient.empty()) {
    average_over(group, distinct(with_gradient));
  }
  ++step;
}

PeriodicModelAverager::PeriodicModelAverager(
    const PeriodicModelAveragerOptions& options)
    : options_(options) {
  require_at_least("PeriodicModelAverager: period", options.period, 1);
  require_at_least("PeriodicModelAverager: warmup_steps", options.warmup_steps,
                   0);
  options_.process_group = internal::group_or_default(options_.process_group);
}

ProcessGroupPtr PeriodicModelAverager::group_of_step() const {
  const auto since = step - options_.warmup_steps;
  return since >= 0 && since % options_.period == 0 ? options_.process_group
                                                    : nullptr;
}

HierarchicalModelAverager::HierarchicalModelAverager(
    const HierarchicalModelAveragerOptions& options)
    : warmup_steps_(options.warmup_steps) {
  require_at_least("HierarchicalModelAverager: warmup_steps",
                   options.warmup_steps, 0);
  auto refuse = [](const std::string& what) {
    throw std::invalid_argument(
        "HierarchicalModelAverager: " + what +
        "; give pairs of period and group size, both rising; each size must "
        "divide that of process_group, and the last must be equal to it");
  };
  const std::vector<std::pair<int64_t, int>>& levels =
      options.period_group_size_dict;
  const auto parent = internal::group_or_default(options.process_group);
  if (levels.empty()) refuse("period_group_size_dict is empty");
  for (size_t i = 0; i < levels.size(); ++i) {
    const auto [period, size] = levels[i];
    if (period < 1 || (i > 0 && period <= levels[i - 1].first)) {
      refuse(
          c10::str("period ", period, " of period_group_size_dict is ",
                   period < 1 ? "not positive" : "not above the previous one"));
    }
    if (size < 1 || parent->size() % size != 0 ||
        (i > 0 && size <= levels[i - 1].second)) {
      refuse(c10::str("group size ", size, " of period_group_size_dict ",
                      i > 0 && size <= levels[i - 1].second
                          ? "is not above the previous one"
                          : "does not divide the group",
                      " of ", parent->size(), " ranks"));
    }
  }
  if (levels.back().second != parent->size()) {
    refuse(c10::str("the last group size of period_group_size_dict is ",
                    levels.back().second, ", but process_group has ",
                    parent->size(), " ranks"));
  }
  for (const auto& [period, size] : levels) {
    groups_.emplace_back(
        period, size == parent->size() ? parent : neighbours(parent, size));
  }
}

ProcessGroupPtr HierarchicalModelAverager::group_of_step() const {
  if (step < warmup_steps_) return nullptr;
  for (auto level = groups_.rbegin(); level != groups_.rend(); ++level) {
    if (step % level->first == 0) return level->second;
  }
  return nullptr;
}

}  // namespace lockstep
