#include "lockstep/amp/slow_autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

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

}  // namespace

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

}  // namespace lockstep::internal
