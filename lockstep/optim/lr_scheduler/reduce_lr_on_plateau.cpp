#include "lockstep/optim/lr_scheduler/reduce_lr_on_plateau.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace lockstep::optim {
namespace {

constexpr const char* kPlateau = "ReduceLROnPlateau";

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                                     const ReduceLROnPlateauOptions& options)
    : groups_(std::make_unique<internal::SchedulerGroups>(optimizer)),
      mode_(options.mode),
      factor_(options.factor),
      patience_(options.patience),
      threshold_(options.threshold),
      threshold_mode_(options.threshold_mode),
      cooldown_(options.cooldown),
      eps_(options.eps),
      mode_worse_(mode_ == PlateauMode::min
                      ? std::numeric_limits<double>::infinity()
                      : -std::numeric_limits<double>::infinity()),
      best_(mode_worse_),
      last_lr_(groups_->lrs()) {
  if (!(factor_ < 1)) {
    throw std::invalid_argument("ReduceLROnPlateau: factor is " +
                                std::to_string(factor_) +
                                "; give a number below 1");
  }
  const size_t count = groups_->size();
  for (size_t group = 0; group < count; ++group) {
    min_lrs_.push_back(
        options.min_lr.of(group, count, "ReduceLROnPlateau: min_lr"));
  }
  if (options.min_lr.is_one_for_all()) {
    default_min_lr_ = options.min_lr.values().front();
  }
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const bool relative = threshold_mode_ == ThresholdMode::rel;
  if (mode_ == PlateauMode::min) {
    return metric <
           (relative ? best_ * (1.0 - threshold_) : best_ - threshold_);
  }
  return metric > (relative ? best_ * (threshold_ + 1.0) : best_ + threshold_);
}

void ReduceLROnPlateau::step(double metric) {
  const size_t count = groups_->size();
  if (min_lrs_.size() != count) {
    if (!default_min_lr_) {
      throw std::invalid_argument(
          "ReduceLROnPlateau: min_lr has " + std::to_string(min_lrs_.size()) +
          " values, but the optimizer now has " + std::to_string(count) +
          " parameter groups; give one number for all groups");
    }
    min_lrs_.assign(count, *default_min_lr_);
  }
  ++last_epoch_;
  if (is_better(metric)) {
    best_ = metric;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (in_cooldown()) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > patience_) {
    reduce_lr();
    cooldown_counter_ = cooldown_;
    num_bad_epochs_ = 0;
  }
  last_lr_ = groups_->lrs();
}

void ReduceLROnPlateau::reduce_lr() {
  for (size_t group = 0; group < groups_->size(); ++group) {
    const double before = groups_->lr(group);
    const double reduced = std::max(before * factor_, min_lrs_[group]);
    if (before - reduced > eps_) groups_->set_lr(group, reduced);
  }
}

internal::StateFields ReduceLROnPlateau::state_fields() {
  internal::StateFields fields(kPlateau);
  const size_t groups = groups_->size();
  fields.add("factor", factor_);
  fields.add("default_min_lr", default_min_lr_);
  fields.add("min_lrs", min_lrs_, groups);
  fields.add("patience", patience_);
  fields.add("cooldown", cooldown_);
  fields.add("eps", eps_);
  fields.add("last_epoch", last_epoch_);
  fields.add("_last_lr", last_lr_, groups);
  fields.add("mode_worse", mode_worse_);
  fields.add("mode", mode_, {"min", "max"});
  fields.add("threshold", threshold_);
  fields.add("threshold_mode", threshold_mode_, {"rel", "abs"});
  fields.add("best", best_);
  fields.add("cooldown_counter", cooldown_counter_);
  fields.add("num_bad_epochs", num_bad_epochs_);
  return fields;
}

StateTree ReduceLROnPlateau::state_dict() const {
  // The fields refer to members that restoring would write; capturing does not.
  return const_cast<ReduceLROnPlateau*>(this)->state_fields().capture();
}

std::function<void()> ReduceLROnPlateau::prepare_load(const StateTree& state) {
  return state_fields().restore(state);
}

}  // namespace lockstep::optim
