#include "lockstep/parallel/healing/trained_parameters.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace lockstep::internal {
namespace {

// After so many updates of a parameter without a kept gradient, records leave
// its gradients out again.
constexpr int kRecordedFor = 16;

// So many places of a tensor are looked at.
constexpr size_t kSampled = 8;

// Returns a number that depends on some elements of a tensor on the CPU.
uint64_t sample_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() ||
      tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense())
    return 0;
  const size_t begin =
      static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  const size_t bytes = tensor.nbytes();
  if (bytes == 0 || tensor.storage().nbytes() < begin + bytes) return 0;
  const auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t size = std::min(bytes, sizeof(uint64_t));
  uint64_t sample = 0;
  for (size_t i = 0; i < kSampled; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, from + (bytes - size) / (kSampled - 1) * i, size);
    sample = sample * 31 + word;
  }
  return sample;
}

TrainedParameters::Mark mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return {};
  return {.version = tensor.is_inference()
                         ? 0
                         : static_cast<uint32_t>(tensor._version()),
          .sample = sample_of(tensor)};
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

TrainedParameters::Marks TrainedParameters::marks_of(
    const std::vector<at::Tensor>& tensors) {
  Marks marks;
  marks.reserve(tensors.size());
  for (const at::Tensor& one : tensors) marks.push_back(mark_of(one));
  return marks;
}

std::string TrainedParameters::name_of(size_t index) const {
  std::string found;
  for_each_module(state_, [&](const auto& module, const std::string& prefix) {
    for (const auto& one : module.named_parameters()) {
      if (one.value().is_same(all_[index])) found = prefix + one.key();
    }
  });
  return found.empty() ? "number " + std::to_string(index) : found;
}

void TrainedParameters::require_unchanged(const Marks& before) const {
  for (size_t i = 0; i < all_.size(); ++i) {
    if (mark_of(all_[i]) == before[i]) continue;
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
  marks_before_ = marks();
  had_gradient_.clear();
  for (const at::Tensor& parameter : all_) {
    had_gradient_.push_back(parameter.grad().defined());
  }
}

void TrainedParameters::update_has_ended() {
  kept_.clear();
  keeps_unrecorded_ = false;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (mark_of(all_[i]) != marks_before_[i]) {
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
  const bool steps_by_hand =
      state_.optimizer == nullptr &&
      std::ranges::none_of(state_.items, [](const auto& item) {
        return item.second.optimizer() != nullptr;
      });
  if (steps_by_hand || has_optimizer(index)) return;
  warned_ = true;
  TORCH_WARN("lockstep: update changes the parameter \"", name_of(index),
             "\", which no optimizer of TrainingState has; if an optimizer "
             "changes it, add that to TrainingState::items, because a process "
             "that takes a place would begin with an empty one");
}

void TrainedParameters::function_begins() {
  marks_before_ = marks();
  gradients_before_.clear();
  for (const at::Tensor& parameter : all_) {
    gradients_before_.push_back(sample_of(parameter.grad()));
  }
}

void TrainedParameters::require_same_state() const {
  for (size_t i = 0; i < all_.size(); ++i) {
    // The forward of a wrapper may drop gradients or move them.
    const uint64_t gradient = sample_of(all_[i].grad());
    const bool same_gradient =
        gradient == 0 || gradient == gradients_before_[i];
    // Other weights may have been here meanwhile.
    const bool same = sample_of(all_[i]) == marks_before_[i].sample;
    if (same && same_gradient) continue;
    throw std::logic_error(
        "HealedTraining: a function that was given to run() alone has "
        "changed " +
        std::string(same ? "the gradient of \"" : "the parameter \"") +
        name_of(i) +
        "\", which would be lost if a rank died; give run() two functions, of "
        "which the first computes gradients and the second updates");
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
