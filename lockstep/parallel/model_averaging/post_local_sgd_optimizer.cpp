#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"

namespace lockstep {
namespace {

constexpr const char* kStep = "step";

torch::optim::Optimizer& require(
    const std::shared_ptr<torch::optim::Optimizer>& optim) {
  if (!optim || optim->param_groups().empty()) {
    throw std::invalid_argument(
        "PostLocalSGDOptimizer: there is no optimizer, or it has no "
        "parameters; give the optimizer that steps the parameters");
  }
  return *optim;
}

// Adds the group as the class of `optim` does, whose function is not virtual.
void add_as_its_class(torch::optim::Optimizer& optim,
                      const torch::optim::OptimizerParamGroup& group) {
  const auto added = [&](auto* ours) {
    if (ours) ours->add_param_group(group);
    return ours != nullptr;
  };
  if (added(dynamic_cast<optim::SGD*>(&optim)) ||
      added(dynamic_cast<optim::Adam*>(&optim)) ||
      added(dynamic_cast<optim::AdamW*>(&optim))) {
    return;
  }
  optim.add_param_group(group);
}

}  // namespace

PostLocalSGDOptimizer::PostLocalSGDOptimizer(
    std::shared_ptr<torch::optim::Optimizer> optim,
    std::shared_ptr<ModelAverager> averager)
    : Optimizer(require(optim).param_groups(),
                require(optim).param_groups()[0].options().clone()),
      optim_(std::move(optim)),
      averager_(std::move(averager)) {
  if (!averager_) {
    throw std::invalid_argument(
        "PostLocalSGDOptimizer: the averager is null; give a "
        "std::make_shared<PeriodicModelAverager>(options)");
  }
  // LibTorch's constructor changes options that look as if they were not set.
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(optim_->param_groups()[i].options().clone());
  }
  try {
    for (const auto& group : optim_->param_groups()) {
      learning_rates_.push_back(group.options().get_lr());
    }
  } catch (const c10::Error&) {  // this optimizer has no learning rate
    learning_rates_.clear();
    has_learning_rate_ = false;
  }
}

void PostLocalSGDOptimizer::require_same_groups() const {
  const auto& mine = param_groups();
  const auto& theirs = std::as_const(*optim_).param_groups();
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(
        a.params().begin(), a.params().end(), b.params().begin(),
        b.params().end(),
        [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
  };
  if (std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                 same)) {
    return;
  }
  throw std::invalid_argument(
      c10::str("PostLocalSGDOptimizer: its parameter groups (", mine.size(),
               ") are not those of optim() (", theirs.size(),
               "); add a group with PostLocalSGDOptimizer::add_param_group(), "
               "which adds it to both"));
}

torch::optim::Optimizer& PostLocalSGDOptimizer::wrapped() const {
  require_same_groups();
  for (size_t i = 0; i < learning_rates_.size(); ++i) {
    const double mine = param_groups()[i].options().get_lr();
    if (mine == learning_rates_[i]) continue;
    auto& options = optim_->param_groups()[i].options();
    const double theirs = options.get_lr();
    if (theirs != learning_rates_[i] && theirs != mine) {
      throw std::invalid_argument(c10::str(
          "PostLocalSGDOptimizer: the learning rate of group ", i,
          " was set to ", mine, " here and to ", theirs,
          " in optim(); set it on one side, and give snapshots this optimizer, "
          "not optim()"));
    }
    options.set_lr(mine);
    learning_rates_[i] = mine;
  }
  return *optim_;
}

void PostLocalSGDOptimizer::take_loaded(std::optional<int64_t> averager_step) {
  if (!averager_step) {
    TORCH_WARN_ONCE(
        "PostLocalSGDOptimizer: the state that was loaded has no step of the "
        "averager, which counts from 0 now");
  }
  averager_->step = averager_step.value_or(0);
  take_rates();
}

void PostLocalSGDOptimizer::take_rates() {
  for (size_t i = 0; i < learning_rates_.size(); ++i) {
    learning_rates_[i] = optim_->param_groups()[i].options().get_lr();
    param_groups()[i].options().set_lr(learning_rates_[i]);
  }
}

void PostLocalSGDOptimizer::add_param_group(
    const torch::optim::OptimizerParamGroup& group) {
  require_same_groups();
  torch::optim::OptimizerParamGroup once(group);
  once.params() = distinct(std::move(once.params()));
  add_as_its_class(*optim_, once);
  const auto& added = optim_->param_groups().back();
  Optimizer::add_param_group(added);
  param_groups_.back().set_options(added.options().clone());
  if (has_learning_rate_) learning_rates_.push_back(added.options().get_lr());
}

at::Tensor PostLocalSGDOptimizer::step(LossClosure closure) {
  torch::optim::Optimizer& optim = wrapped();
  take_rates();
  auto loss = optim.step(std::move(closure));
  averager_->average_parameters(optim.param_groups());
  return loss;
}

void PostLocalSGDOptimizer::save(
    torch::serialize::OutputArchive& archive) const {
  wrapped().save(archive);
  archive.write(kStep, c10::IValue(averager_->step));
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  require_same_groups();
  optim_->load(archive);
  c10::IValue step;
  const bool has_step = archive.try_read(kStep, step);
  take_loaded(has_step ? std::optional(step.toInt()) : std::nullopt);
}

}  // namespace lockstep
