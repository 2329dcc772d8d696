#pragma once

#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

namespace lockstep::optim {

// An option of a scheduler for the optimizer's parameter groups: one number for
// all groups, or a list with one for each.
//
//   .max_lr = 0.1
//   .max_lr = {0.1, 0.01}
class PerGroup {
 public:
  PerGroup() = default;  // not given
  PerGroup(double value) : values_{value}, for_all_(true) {}
  PerGroup(std::initializer_list<double> values)
      : PerGroup(std::vector<double>(values)) {}
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}

  bool is_one_for_all() const { return for_all_; }
  const std::vector<double>& values() const { return values_; }

  // Returns the number of one group. Throws std::invalid_argument that names
  // `option` ("OneCycleLR: max_lr") unless the option is one number or a list
  // of `groups` numbers.
  double of(size_t group, size_t groups, const char* option) const;

 private:
  std::vector<double> values_;
  bool for_all_ = false;
};

}  // namespace lockstep::optim
