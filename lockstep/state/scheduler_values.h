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

}  // namespace lockstep::internal
