#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::optim {

template <class T>
const T& PerGroup<T>::of(size_t group, size_t groups,
                         const char* option) const {
  if (for_all_) return values_.front();
  if (values_.size() != groups) {
    constexpr bool is_number = std::is_same_v<T, double>;
    throw std::invalid_argument(
        std::string(option) + " has " + std::to_string(values_.size()) +
        (is_number ? " values" : " functions") + ", but the optimizer has " +
        std::to_string(groups) + " parameter groups; give one " +
        (is_number ? "number" : "function") +
        " for all, or one for each group");
  }
  return values_[group];
}

template class PerGroup<double>;
template class PerGroup<LRLambda>;

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer,
                         const Schedule& schedule)
    : rule_(internal::SchedulerRule::make(
          schedule, std::make_shared<internal::SchedulerGroups>(optimizer))) {}

LRScheduler::~LRScheduler() = default;

void LRScheduler::step() { rule_->step(); }

const std::vector<double>& LRScheduler::get_last_lr() const {
  return rule_->last_lr();
}

int64_t LRScheduler::last_epoch() const { return rule_->last_epoch(); }

StateTree LRScheduler::state_dict() const { return rule_->state_dict(); }

std::function<void()> LRScheduler::prepare_load(const StateTree& state) {
  return rule_->prepare_load(state);
}

}  // namespace lockstep::optim
