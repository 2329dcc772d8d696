// Operations on vectors of float32 and float64. Included once for each target.
#if defined(LOCKSTEP_KERNELS_FLOAT_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_FLOAT_OPS_INL_H_
#undef LOCKSTEP_KERNELS_FLOAT_OPS_INL_H_
#else
#define LOCKSTEP_KERNELS_FLOAT_OPS_INL_H_
#endif

#include <hwy/highway.h>

#include "lockstep/kernels/reduce_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

struct MeanOp : SumOp {
  explicit MeanOp(size_t sources) : SumOp(sources), sources_(sources) {}
  template <class V>
  HWY_INLINE V finish(V v) const {
    using D = hn::DFromV<V>;
    return hn::Div(v, hn::Set(D(), static_cast<hn::TFromD<D>>(sources_)));
  }

 private:
  size_t sources_;
};

struct ProductOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Mul(a, b);
  }
};

// x86's min gives the second operand if either is NaN or both are zeros. Or-ing
// the results of both orders keeps the bits of a NaN and the sign of -0. It
// changes nothing else, because otherwise both results are equal.
struct MinOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Or(hn::Min(a, b), hn::Min(b, a));
  }
};

// Takes the negated minimum of the negated values: and-ing both orders would
// not keep a NaN.
struct MaxOp : MinOp {
  using MinOp::MinOp;
  template <class V>
  HWY_INLINE V prepare(V v) const {
    return hn::Neg(v);
  }
  template <class V>
  HWY_INLINE V finish(V v) const {
    return hn::Neg(v);
  }
};

template <class Codec, template <class> class Lift>
void reduce_floating(const ReduceCall& call) {
  switch (call.op) {
    case ReduceOp::sum:
      return reduce_vectors<Codec, Lift<SumOp>>(call, call.count);
    case ReduceOp::avg:
      return reduce_vectors<Codec, Lift<MeanOp>>(call, call.count);
    case ReduceOp::product:
      return reduce_vectors<Codec, Lift<ProductOp>>(call, call.count);
    case ReduceOp::min:
      return reduce_vectors<Codec, Lift<MinOp>>(call, call.count);
    case ReduceOp::max:
      return reduce_vectors<Codec, Lift<MaxOp>>(call, call.count);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      return;  // is_reducible() says no
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#endif
