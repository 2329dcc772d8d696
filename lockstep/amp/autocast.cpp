#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "lockstep/amp/slow_autocast.h"
#include "lockstep/comm/accelerator.h"

namespace lockstep {

namespace {

void check_device(c10::DeviceType device) {
  if (at::autocast::is_autocast_available(device)) return;
  std::ostringstream message;
  message << "Autocast: LibTorch has no autocast for " << device
          << "; it has one for cpu, for cuda and for accelerators that are "
             "built into it. Name the device that the operations run on.";
  throw std::invalid_argument(message.str());
}

void check_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  std::vector<c10::ScalarType> allowed = {at::kBFloat16, at::kHalf};
  if (device == c10::DeviceType::CUDA) allowed.push_back(at::kFloat);
  if (std::ranges::find(allowed, dtype) != allowed.end()) return;
  std::ostringstream message;
  message << "Autocast: dtype " << dtype << " is not supported on " << device
          << "; supported are:";
  for (auto one : allowed) message << ' ' << one;
  message << ". Name one of them, or pass enabled = false to compute without "
             "autocast.";
  throw std::invalid_argument(message.str());
}

}  // namespace

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                   bool enabled, std::optional<bool> cache_enabled)
    : device_(device) {
  check_device(device);
  enabled_before_ = at::autocast::is_autocast_enabled(device);
  dtype_before_ = at::autocast::get_autocast_dtype(device);
  cache_enabled_before_ = at::autocast::is_autocast_cache_enabled();
  auto chosen = dtype.value_or(dtype_before_);
  if (enabled) check_dtype(device, chosen);
  if (device != at::kCPU && device != internal::visible_accelerator()) {
    enabled = false;
  }
  if (enabled && device == c10::DeviceType::CPU) {
    internal::warn_if_slow_on_cpu(chosen);
  }

  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, chosen);
  at::autocast::set_autocast_cache_enabled(
      cache_enabled.value_or(cache_enabled_before_));
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
}

}  // namespace lockstep
