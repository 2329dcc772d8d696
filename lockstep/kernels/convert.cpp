#include "lockstep/kernels/convert.h"

#include <cmath>
#include <cstdint>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/convert.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include "lockstep/kernels/half_vectors_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// Each of these takes one floating type as vectors of float32: as many elements
// of it at a time as one such vector holds.
struct Float32Lanes {
  using Element = float;
  static HWY_INLINE hn::Vec<F32> load(const Element* from) {
    return hn::LoadU(F32(), from);
  }
  static HWY_INLINE void store(hn::Vec<F32> value, Element* to) {
    hn::StoreU(value, F32(), to);
  }
};

struct Float64Lanes {
  using Element = double;
  using F64 = hn::ScalableTag<double>;
  static constexpr size_t kHalf = hn::MaxLanes(F64());
  static HWY_INLINE hn::Vec<F32> load(const Element* from) {
    const hn::Half<F32> half;
    return hn::Combine(F32(),
                       hn::DemoteTo(half, hn::LoadU(F64(), from + kHalf)),
                       hn::DemoteTo(half, hn::LoadU(F64(), from)));
  }
  static HWY_INLINE void store(hn::Vec<F32> value, Element* to) {
    const hn::Half<F32> half;
    hn::StoreU(hn::PromoteTo(F64(), hn::LowerHalf(half, value)), F64(), to);
    hn::StoreU(hn::PromoteTo(F64(), hn::UpperHalf(half, value)), F64(),
               to + kHalf);
  }
};

struct Float16Lanes {
  using Element = uint16_t;
  static HWY_INLINE hn::Vec<F32> load(const Element* from) {
    return float_of_float16(hn::LoadU(HalfU16(), from));
  }
  static HWY_INLINE void store(hn::Vec<F32> value, Element* to) {
    hn::StoreU(float16_of_float(value), HalfU16(), to);
  }
};

struct BFloat16Lanes {
  using Element = uint16_t;
  static HWY_INLINE hn::Vec<F32> load(const Element* from) {
    return float_of_bfloat16(hn::LoadU(HalfU16(), from));
  }
  static HWY_INLINE void store(hn::Vec<F32> value, Element* to) {
    hn::StoreU(bfloat16_of_float(value), HalfU16(), to);
  }
};

// Both convert whole vectors only, and return how many elements that were.
template <class To, class From>
size_t convert_vectors(void* destination, const void* source, size_t count) {
  constexpr size_t kLanes = hn::MaxLanes(F32());
  const auto* from = static_cast<const typename From::Element*>(source);
  auto* to = static_cast<typename To::Element*>(destination);
  size_t i = 0;
  for (; count - i >= 2 * kLanes; i += 2 * kLanes) {
    const auto first = From::load(from + i);
    const auto second = From::load(from + i + kLanes);
    To::store(first, to + i);
    To::store(second, to + i + kLanes);
  }
  return i;
}

template <class To, class From>
size_t convert_scaled_vectors(void* destination, const void* source,
                              size_t count, float factor) {
  constexpr size_t kLanes = hn::MaxLanes(F32());
  const auto* from = static_cast<const typename From::Element*>(source);
  auto* to = static_cast<typename To::Element*>(destination);
  const auto factors = hn::Set(F32(), factor);
  size_t i = 0;
  for (; count - i >= 2 * kLanes; i += 2 * kLanes) {
    const auto first = From::load(from + i);
    const auto second = From::load(from + i + kLanes);
    To::store(hn::Mul(first, factors), to + i);
    To::store(hn::Mul(second, factors), to + i + kLanes);
  }
  return i;
}

// Returns body(Lanes()) with the Lanes of a floating type.
template <class Body>
size_t with_lanes(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32:
      return body(Float32Lanes());
    case DType::float64:
      return body(Float64Lanes());
    case DType::float16:
      return body(Float16Lanes());
    case DType::bfloat16:
      return body(BFloat16Lanes());
    default:
      return 0;
  }
}

#endif

size_t convert_here([[maybe_unused]] void* destination,
                    [[maybe_unused]] DType to,
                    [[maybe_unused]] const void* source,
                    [[maybe_unused]] DType from,
                    [[maybe_unused]] size_t count) {
#if HWY_TARGET == HWY_SCALAR
  return 0;
#else
  return with_lanes(from, [&](auto from_lanes) {
    return with_lanes(to, [&](auto to_lanes) {
      return convert_vectors<decltype(to_lanes), decltype(from_lanes)>(
          destination, source, count);
    });
  });
#endif
}

// Neither type may be float64, whose products are computed in float64.
size_t convert_scaled_here([[maybe_unused]] void* destination,
                           [[maybe_unused]] DType to,
                           [[maybe_unused]] const void* source,
                           [[maybe_unused]] DType from,
                           [[maybe_unused]] size_t count,
                           [[maybe_unused]] float factor) {
#if HWY_TARGET == HWY_SCALAR
  return 0;
#else
  return with_lanes(from, [&](auto from_lanes) {
    return with_lanes(to, [&](auto to_lanes) {
      return convert_scaled_vectors<decltype(to_lanes), decltype(from_lanes)>(
          destination, source, count, factor);
    });
  });
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {
namespace {

void* advance(void* pointer, size_t elements, DType dtype) {
  return static_cast<uint8_t*>(pointer) + elements * size_of(dtype);
}

const void* advance(const void* pointer, size_t elements, DType dtype) {
  return static_cast<const uint8_t*>(pointer) + elements * size_of(dtype);
}

}  // namespace

HWY_EXPORT(convert_here);
HWY_EXPORT(convert_scaled_here);

void convert(void* destination, DType to, const void* source, DType from,
             size_t count) {
  size_t done = 0;
  if (to != from && is_floating(to) && is_floating(from)) {
    done = HWY_DYNAMIC_DISPATCH(convert_here)(destination, to, source, from,
                                              count);
  }
  if (done < count) {
    convert_scalar(advance(destination, done, to), to,
                   advance(source, done, from), from, count - done);
  }
}

void convert_scaled(void* destination, DType to, const void* source, DType from,
                    size_t count, double factor) {
  size_t done = 0;
  if (to != DType::float64 && from != DType::float64) {
    done = HWY_DYNAMIC_DISPATCH(convert_scaled_here)(
        destination, to, source, from, count, static_cast<float>(factor));
  }
  if (done < count) {
    convert_scaled_scalar(advance(destination, done, to), to,
                          advance(source, done, from), from, count - done,
                          factor);
  }
}

}  // namespace lockstep::kernels
#endif
