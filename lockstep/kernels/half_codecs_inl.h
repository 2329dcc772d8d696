// Codecs by which the loop of the reductions (reduce_inl.h) takes float16 and
// bfloat16. Included once for each target.
#if defined(LOCKSTEP_KERNELS_HALF_CODECS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_HALF_CODECS_INL_H_
#undef LOCKSTEP_KERNELS_HALF_CODECS_INL_H_
#else
#define LOCKSTEP_KERNELS_HALF_CODECS_INL_H_
#endif

#include <hwy/highway.h>

#include "lockstep/kernels/half_vectors_inl.h"

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Pair::a holds the lower half of the elements, Pair::b the upper half.
struct Float16Codec {
  using Tag = U16;
  using Wide = Pair;
  static constexpr size_t kVectors = 4;
  static HWY_INLINE Wide decode(hn::Vec<Tag> stored) {
    return {float_of_float16(hn::LowerHalf(HalfU16(), stored)),
            float_of_float16(hn::UpperHalf(HalfU16(), stored))};
  }
  static HWY_INLINE hn::Vec<Tag> encode(Wide wide) {
    return hn::Combine(Tag(), float16_of_float(wide.b),
                       float16_of_float(wide.a));
  }
};

// Pair::a holds the even elements, Pair::b the odd ones: a bfloat16 is the
// upper half of a float32, so nothing has to move between lanes. A NaN that
// results from bfloat16s is one of them or the processor's own, so its lower
// half is zero, as round_to_bfloat16() requires.
struct BFloat16Codec {
  using Tag = U16;
  using Wide = Pair;
  static constexpr size_t kVectors = 4;
  static HWY_INLINE Wide decode(hn::Vec<Tag> stored) {
    const auto both = hn::BitCast(U32(), stored);
    const auto upper = hn::Set(U32(), 0xffff0000u);
    return {hn::BitCast(F32(), hn::ShiftLeft<16>(both)),
            hn::BitCast(F32(), hn::And(both, upper))};
  }
  static HWY_INLINE hn::Vec<Tag> encode(Wide wide) {
    const auto even = hn::ShiftRight<16>(round_to_bfloat16(wide.a));
    const auto odd = round_to_bfloat16(wide.b);
    return hn::OddEven(hn::BitCast(Tag(), odd), hn::BitCast(Tag(), even));
  }
};

template <class Op>
struct OnPairs {
  template <class Argument>
  explicit OnPairs(Argument argument) : op(argument) {}
  HWY_INLINE Pair prepare(Pair v) const {
    return {op.prepare(v.a), op.prepare(v.b)};
  }
  HWY_INLINE Pair apply(Pair v, Pair w) const {
    return {op.apply(v.a, w.a), op.apply(v.b, w.b)};
  }
  HWY_INLINE Pair finish(Pair v) const {
    return {op.finish(v.a), op.finish(v.b)};
  }
  Op op;
};

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR

#endif
