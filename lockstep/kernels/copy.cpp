#include "lockstep/kernels/kernels.h"

#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/copy.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void copy_streaming(uint8_t* to, const uint8_t* from, size_t bytes) {
#if HWY_TARGET == HWY_SCALAR
  std::memcpy(to, from, bytes);
#else
  const hn::ScalableTag<uint8_t> d;
  constexpr size_t kVector = hn::MaxLanes(d);
  constexpr size_t kLine = 64;
  const size_t past = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = past == 0 ? 0 : kLine - past;
  if (bytes < head + 4 * kLine) {
    std::memcpy(to, from, bytes);
  } else {
    std::memcpy(to, from, head);
    size_t i = head;
    for (; bytes - i >= 4 * kVector; i += 4 * kVector) {
      const auto a = hn::LoadU(d, from + i);
      const auto b = hn::LoadU(d, from + i + kVector);
      const auto c = hn::LoadU(d, from + i + 2 * kVector);
      const auto e = hn::LoadU(d, from + i + 3 * kVector);
      hn::Stream(a, d, to + i);
      hn::Stream(b, d, to + i + kVector);
      hn::Stream(c, d, to + i + 2 * kVector);
      hn::Stream(e, d, to + i + 3 * kVector);
    }
    std::memcpy(to + i, from + i, bytes - i);
  }
  hwy::FlushStream();
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::internal::kernels {

HWY_EXPORT(copy_streaming);

void copy(void* destination, const void* source, size_t bytes, Stores stores) {
  if (bytes == 0) {
    return;  // memcpy must not be given null even then
  }
  if (stores == Stores::cached) {
    std::memcpy(destination, source, bytes);
  } else {
    HWY_DYNAMIC_DISPATCH(copy_streaming)
    (static_cast<uint8_t*>(destination), static_cast<const uint8_t*>(source),
     bytes);
  }
}

}  // namespace lockstep::internal::kernels
#endif
