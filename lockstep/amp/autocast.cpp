#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {
namespace {

// Returns whether oneDNN, which LibTorch's CPU matrix products and convolutions
// use, computes in that dtype on this CPU: bfloat16 needs AVX-512, float16 its
// FP16 extension (or AVX10 and the like). Without oneDNN LibTorch falls back to
// plain loops.
bool is_supported(const char* question) {
  const auto op = c10::Dispatcher::singleton().findSchema({question, ""});
  return !op || op->typed<bool()>().call();
}

// Warns, once for each dtype and process, if matrix products in `dtype` have no
// fast kernel on this CPU: they then take many times as long as in float32.
// Calls the operators by which LibTorch itself decides; if this LibTorch does
// not have them, the CPU counts as fast.
void warn_if_slow_on_cpu(c10::ScalarType dtype) {
  if (dtype == c10::kBFloat16) {
    static const bool fast = is_supported("mkldnn::_is_mkldnn_bf16_supported");
    if (fast) return;
    TORCH_WARN_ONCE(
        "Autocast: this CPU has no fast bfloat16 (it lacks AVX-512), so matrix "
        "products under autocast take many times as long as in float32; train "
        "without autocast here, or on a CPU with AVX-512 or AMX");
  }
  if (dtype == c10::kHalf) {
    static const bool fast = is_supported("mkldnn::_is_mkldnn_fp16_supported");
    if (fast) return;
    TORCH_WARN_ONCE(
        "Autocast: this CPU has no fast float16 (it lacks AVX-512 FP16), so "
        "matrix products under autocast take many times as long as in "
        "float32; train without autocast here, or name bfloat16 on a CPU with "
        "AVX-512");
  }
}

}  // namespace

}  // namespace lockstep::internal

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
