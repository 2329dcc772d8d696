#include "lockstep/optim/lr_scheduler/per_group.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

double PerGroup::of(size_t group, size_t groups, const char* option) const {
  if (for_all_) return values_.front();
  if (values_.empty()) {
    throw std::invalid_argument(std::string(option) +
                                " is not given; give one number, or a list "
                                "with one for each parameter group");
  }
  if (values_.size() != groups) {
    throw std::invalid_argument(
        std::string(option) + " has " + std::to_string(values_.size()) +
        " values, but the optimizer has " + std::to_string(groups) +
        " parameter groups; give one number for all, or one for each group");
  }
  return values_[group];
}

}  // namespace lockstep::optim
