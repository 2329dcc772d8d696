#include "lockstep/parallel/healing/trained_parameters.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <stdexcept>

namespace lockstep::internal {
namespace {

// After so many updates of a parameter without a kept gradient, records leave
// its gradients out again.
constexpr int kRecordedFor = 16;

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference()
             ? static_cast<uint32_t>(tensor._version())
             : 0;
}

// Calls `visit` with each module of the state and the beginning of its
// parameters' names.
template <class Visit>
void for_each_module(const TrainingState& state, const Visit& visit) {
  visit(*state.model, "");
  for (const auto& [name, item] : state.items) {
    if (item.module()) visit(*item.module(), name + ".");
  }
}

}  // namespace

TrainedParameters::TrainedParameters(const TrainingState& state)
    : state_(state) {
  for_each_module(state_, [this](const auto& module, const std::string&) {
    for (const at::Tensor& parameter : module.parameters()) {
      if (parameter.defined()) all_.push_back(parameter);
    }
  });
  recorded_for_.resize(all_.size());
  checked_.resize(all_.size());
}

TrainedParameters::Versions TrainedParameters::versions_of(
    const std::vector<at::Tensor>& tensors) {
  Versions versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& one : tensors) versions.push_back(version_of(one));
  return versions;
}

TrainedParameters::Versions TrainedParameters::versions() const {
  return versions_of(all_);
}

std::string TrainedParameters::name_of(size_t index) const {
  std::string found;
  for_each_module(state_, [&](const auto& module, const std::string& prefix) {
    for (const auto& one : module.named_parameters()) {
      if (one.value().is_same(all_[index])) found = prefix + one.key();
    }
  });
  return found.empty() ? "of number " + std::to_string(index) : found;
}

void TrainedParameters::require_unchanged(const Versions& before) const {
  for (size_t i = 0; i < all_.size(); ++i) {
    if (version_of(all_[i]) == before[i]) continue;
    throw std::logic_error(
        "HealedTraining: compute has changed the parameter \"" + name_of(i) +
        "\", but it may be called again with the same batch; let update do all "
        "steps of optimizers (not apply_optimizer_in_backward())");
  }
}

bool TrainedParameters::is_recordable(size_t index) const {
  const at::Tensor& parameter = all_[index];
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && gradient.layout() == at::kStrided &&
         gradient.sizes() == parameter.sizes() &&
         gradient.scalar_type() == parameter.scalar_type();
}

bool TrainedParameters::has_optimizer(size_t index) const {
  const auto has = [&](torch::optim::Optimizer* optimizer) {
    return optimizer != nullptr &&
           std::ranges::any_of(optimizer->param_groups(), [&](auto& group) {
             return std::ranges::any_of(group.params(),
                                        [&](const at::Tensor& parameter) {
                                          return parameter.is_same(all_[index]);
                                        });
           });
  };
  return has(state_.optimizer) ||
         std::ranges::any_of(state_.items, [&](const auto& item) {
           return has(item.second.optimizer());
         });
}

void TrainedParameters::update_begins() {
  before_update_ = versions();
  had_gradient_.clear();
  for (const at::Tensor& parameter : all_) {
    had_gradient_.push_back(parameter.grad().defined());
  }
}

void TrainedParameters::update_has_ended() {
  const Versions& before = before_update_;
  kept_.clear();
  keeps_unrecorded_ = false;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (version_of(all_[i]) != before[i]) {
      recorded_for_[i] = std::max(0, recorded_for_[i] - 1);
      if (had_gradient_[i]) warn_without_optimizer(i);
      continue;
    }
    if (!all_[i].grad().defined()) continue;
    if (kept_.empty()) kept_.assign(all_.size(), '0');
    kept_[i] = '1';
    recorded_for_[i] = kRecordedFor;
    keeps_unrecorded_ = keeps_unrecorded_ || !is_recordable(i);
  }
}

void TrainedParameters::warn_without_optimizer(size_t index) {
  if (warned_ || checked_[index]) return;
  checked_[index] = true;
  if (has_optimizer(index)) return;
  warned_ = true;
  TORCH_WARN("lockstep: update changes the parameter \"", name_of(index),
             "\", which no optimizer of TrainingState has; if an optimizer "
             "changes it, add that to TrainingState::items, because a process "
             "that takes a place would begin with an empty one");
}

std::vector<at::Tensor> TrainedParameters::gradients() const {
  std::vector<at::Tensor> gradients;
  gradients.reserve(all_.size());
  for (const at::Tensor& parameter : all_) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

void TrainedParameters::require_same_gradients(
    const std::vector<at::Tensor>& before,
    const Versions& versions_before) const {
  for (size_t i = 0; i < all_.size(); ++i) {
    const at::Tensor& now = all_[i].grad();
    if (!now.defined() ||
        (now.is_same(before[i]) && version_of(now) == versions_before[i])) {
      continue;
    }
    throw std::logic_error(
        "HealedTraining: a function that was given to run() alone has changed "
        "the gradient of \"" +
        name_of(i) +
        "\", which would be lost if a rank died; give run() two functions, of "
        "which the first computes gradients");
  }
}

std::vector<at::Tensor> TrainedParameters::gradients_to_record(
    std::string& marks) const {
  std::vector<at::Tensor> recorded;
  marks.assign(all_.size(), '0');
  for (size_t i = 0; i < all_.size(); ++i) {
    if (recorded_for_[i] == 0 || !is_recordable(i)) continue;
    marks[i] = '1';
    recorded.push_back(all_[i].grad().detach());
  }
  return recorded;
}

bool TrainedParameters::have(const std::vector<at::Tensor>& parameters) const {
  return std::ranges::all_of(parameters, [&](const at::Tensor& parameter) {
    return std::ranges::any_of(
        all_, [&](const at::Tensor& own) { return own.is_same(parameter); });
  });
}

size_t TrainedParameters::bytes_of(const std::string& marks) const {
  size_t bytes = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (marks.at(i) == '1') bytes += all_[i].nbytes();
  }
  return bytes;
}

bool TrainedParameters::load_gradients(
    const std::string& kept, const std::string& marks,
    const std::function<at::Tensor(const at::Tensor& like)>& take) {
  kept_ = kept;
  loaded_.assign(all_.size(), {});
  bool complete = true;
  for (size_t i = 0; i < all_.size(); ++i) {
    all_[i].mutable_grad().reset();
    const bool is_kept = !kept.empty() && kept.at(i) == '1';
    const bool is_recorded = !marks.empty() && marks.at(i) == '1';
    complete = complete && (is_recorded || !is_kept);
    if (!is_recorded) continue;
    const at::Tensor gradient = take(all_[i]);
    if (is_kept) loaded_[i] = gradient.to(all_[i].device());
  }
  return complete;
}

void TrainedParameters::set_loaded_gradients() {
  for (size_t i = 0; i < loaded_.size(); ++i) {
    if (!loaded_[i].defined()) continue;
    recorded_for_[i] = kRecordedFor;
    all_[i].mutable_grad() = std::move(loaded_[i]);
  }
}

}  // namespace lockstep::internal
