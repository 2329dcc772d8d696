#include "lockstep/worker/metric_target.h"

#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string>
#include <system_error>

namespace lockstep::internal {

MetricTarget MetricTarget::parse(std::string_view text) {
  const size_t at = text.find_last_of("<>");
  MetricTarget target;
  if (at != std::string_view::npos && at > 0 && text.substr(at + 1, 1) == "=") {
    target.name = text.substr(0, at);
    target.at_most = text[at] == '<';
    const std::string_view number = text.substr(at + 2);
    const auto [end, error] = std::from_chars(
        number.data(), number.data() + number.size(), target.value);
    if (error == std::errc() && end == number.data() + number.size() &&
        std::isfinite(target.value)) {
      return target;
    }
  }
  throw std::invalid_argument(
      "\"" + std::string(text) +
      "\" is not a target; give a metric that the program "
      "logs, <= or >=, and a number: \"loss<=0.3\"");
}

bool MetricTarget::is_met(double number) const {
  return at_most ? number <= value : number >= value;
}

}  // namespace lockstep::internal
