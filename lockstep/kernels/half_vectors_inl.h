// float16 and bfloat16 as vectors of float32; half_bits.h is the plain
// reference and says how they are rounded. Included once for each target.
#if defined(LOCKSTEP_KERNELS_HALF_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_HALF_VECTORS_INL_H_
#undef LOCKSTEP_KERNELS_HALF_VECTORS_INL_H_
#else
#define LOCKSTEP_KERNELS_HALF_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using U16 = hn::ScalableTag<uint16_t>;
using HalfU16 = hn::Rebind<uint16_t, F32>;

// The float32 values of one full vector of 16-bit elements. Which element is
// where depends on the codec.
struct Pair {
  hn::Vec<F32> a;
  hn::Vec<F32> b;
};

// On these targets Highway converts in hardware (F16C, to nearest even). On the
// others its own arithmetic truncates, so ours is used.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || \
    HWY_TARGET == HWY_AVX3_DL

HWY_INLINE hn::Vec<F32> float_of_float16(hn::Vec<HalfU16> bits) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::BitCast(d16, bits));
}

HWY_INLINE hn::Vec<HalfU16> float16_of_float(hn::Vec<F32> value) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::BitCast(HalfU16(), hn::DemoteTo(d16, value));
}

#else

HWY_INLINE hn::Vec<F32> float_of_float16(hn::Vec<HalfU16> stored) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<U32> di;
  const auto bits = hn::PromoteTo(du, stored);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fff));
  const auto is_subnormal =
      hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x0400));
  const auto is_finite =
      hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x7c00));
  const auto subnormal = hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)),
                                 hn::Set(df, 0x1p-24f));
  const auto bias =
      hn::IfThenElse(hn::RebindMask(du, is_finite), hn::Set(du, 112u << 23),
                     hn::Set(du, 224u << 23));
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), bias);
  const auto result = hn::IfThenElse(hn::RebindMask(du, is_subnormal),
                                     hn::BitCast(du, subnormal), normal);
  return hn::BitCast(df, hn::Or(result, sign));
}

HWY_INLINE hn::Vec<HalfU16> float16_of_float(hn::Vec<F32> value) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<U32> di;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
  const auto below = [&](int32_t limit) HWY_ATTR {
    return hn::RebindMask(
        du, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, limit)));
  };
  const auto last = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
  const auto normal =
      hn::Sub(hn::ShiftRight<13>(
                  hn::Add(hn::Add(magnitude, hn::Set(du, 0x0fff)), last)),
              hn::Set(du, 112u << 10));
  const auto half = hn::Set(df, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, magnitude), half)),
              hn::BitCast(du, half));
  const auto finite = hn::IfThenElse(below(0x38800000), subnormal, normal);
  const auto special = hn::IfThenElse(below(0x7f800001), hn::Set(du, 0x7c00),
                                      hn::Set(du, 0x7e00));
  const auto result =
      hn::Or(hn::IfThenElse(below(0x47800000), finite, special), sign);
  return hn::DemoteTo(HalfU16(), hn::BitCast(di, result));
}

#endif

// Returns the bits of a float32 rounded to a bfloat16, which is the upper half;
// the lower half is rubbish. The lower half of a NaN must be zero, otherwise it
// may round to a number.
HWY_INLINE hn::Vec<U32> round_to_bfloat16(hn::Vec<F32> value) {
  const U32 du;
  const auto bits = hn::BitCast(du, value);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  const auto down = hn::Add(bits, hn::Set(du, 0x7fff));
  return hn::IfThenElse(hn::TestBit(bits, hn::Set(du, 0x10000)),
                        hn::Add(down, hn::Set(du, 1)), down);
#else
  const auto last = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(bits, hn::Add(last, hn::Set(du, 0x7fff)));
#endif
}

HWY_INLINE hn::Vec<F32> float_of_bfloat16(hn::Vec<HalfU16> bits) {
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
}

HWY_INLINE hn::Vec<HalfU16> bfloat16_of_float(hn::Vec<F32> value) {
  const U32 du;
  const hn::RebindToSigned<U32> di;
  const auto rounded =
      hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)),
                     hn::Set(du, 0x7fc00000), round_to_bfloat16(value));
  return hn::DemoteTo(HalfU16(), hn::BitCast(di, hn::ShiftRight<16>(rounded)));
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#endif
