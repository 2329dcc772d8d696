#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace lockstep::internal {

// The names of all numbers that schedulers of Python keep for each group in the
// optimizer's `param_groups`, among the optimizer's own.
inline constexpr std::array<std::string_view, 6> kSchedulerValues{
    "initial_lr",    "max_lr",       "min_lr",
    "base_momentum", "max_momentum", "swa_lr"};

inline bool is_scheduler_value(std::string_view name) {
  return std::ranges::find(kSchedulerValues, name) != kSchedulerValues.end();
}

// The interface of an optimizer that has the option `maximize` of torch.optim,
// which LibTorch's optimizers lack, so that snapshots can hold it.
class MaximizeOption {
 public:
  virtual bool maximize() const = 0;

 protected:
  MaximizeOption() = default;
  MaximizeOption(const MaximizeOption&) = default;
  MaximizeOption& operator=(const MaximizeOption&) = default;
  ~MaximizeOption() = default;
};

}  // namespace lockstep::internal
