#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <stdexcept>
#include <utility>

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
  try {
    for (const auto& group : optim_->param_groups()) {
      learning_rates_.push_back(group.options().get_lr());
    }
  } catch (const c10::Error&) {  // this optimizer has no learning rate
    has_learning_rate_ = false;
  }
}

void PostLocalSGDOptimizer::agree_on_learning_rates() {
  // Groups that were added on one side only count as soon as both sides have
  // them.
  auto& theirs = optim_->param_groups();
  learning_rates_.resize(std::min(param_groups().size(), theirs.size()));
  for (size_t i = 0; i < learning_rates_.size(); ++i) {
    auto& mine = param_groups()[i].options();
    if (mine.get_lr() != learning_rates_[i]) {
      theirs[i].options().set_lr(mine.get_lr());
    } else {
      mine.set_lr(theirs[i].options().get_lr());
    }
    learning_rates_[i] = mine.get_lr();
  }
}

at::Tensor PostLocalSGDOptimizer::step(LossClosure closure) {
  if (has_learning_rate_) agree_on_learning_rates();
  auto loss = optim_->step(std::move(closure));
  averager_->average_parameters(optim_->param_groups());
  return loss;
}

void PostLocalSGDOptimizer::save(
    torch::serialize::OutputArchive& archive) const {
  optim_->save(archive);
  archive.write(kStep, c10::IValue(averager_->step));
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  optim_->load(archive);
  c10::IValue step;
  averager_->step = archive.try_read(kStep, step) ? step.toInt() : 0;
  if (!has_learning_rate_) return;
  for (size_t i = 0; i < learning_rates_.size(); ++i) {
    learning_rates_[i] = optim_->param_groups()[i].options().get_lr();
    param_groups()[i].options().set_lr(learning_rates_[i]);
  }
}

}  // namespace lockstep
