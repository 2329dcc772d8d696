#pragma once

#include <string_view>

namespace lockstep::internal {

// "loss<=0.3": a number that a training logs, and when it is good enough.
struct MetricTarget {
  std::string_view name;
  bool at_most = true;  // false means at least
  double value = 0;

  // `text` must outlive the result. Throws std::invalid_argument that says what
  // is allowed.
  static MetricTarget parse(std::string_view text);
  bool is_met(double number) const;
};

}  // namespace lockstep::internal
