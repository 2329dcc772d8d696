#include "lockstep/kernels/kernels.h"

#include <cmath>
#include <limits>

#include "lockstep/kernels/reduce_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/scale.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include "lockstep/kernels/half_codecs_inl.h"
#include "lockstep/kernels/reduce_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// A reduction of one source that ends with a product.
struct ScaleOp : PlainOp {
  explicit ScaleOp(double factor) : PlainOp(1), factor_(factor) {}
  template <class V>
  HWY_INLINE V apply(V a, V) const {
    return a;  // never called: there is one source
  }
  template <class V>
  HWY_INLINE V finish(V v) const {
    using D = hn::DFromV<V>;
    return hn::Mul(v, hn::Set(D(), static_cast<hn::TFromD<D>>(factor_)));
  }

 private:
  double factor_;
};

template <class Codec, class Op>
void scale_vectors(void* destination, const void* source, size_t count,
                   double factor, Stores stores) {
  void* const destinations[] = {destination};
  const void* const sources[] = {source};
  Reduction<Codec, Op>(destinations, sources, Op(factor)).run(count, stores);
}

#endif

void scale_here(void* destination, const void* source, size_t count,
                DType dtype, double factor, [[maybe_unused]] Stores stores) {
#if HWY_TARGET == HWY_SCALAR
  scale_scalar(destination, source, count, dtype, factor);
#else
  switch (dtype) {
    case DType::float32:
      return scale_vectors<PlainCodec<float>, ScaleOp>(destination, source,
                                                       count, factor, stores);
    case DType::float64:
      return scale_vectors<PlainCodec<double>, ScaleOp>(destination, source,
                                                        count, factor, stores);
    case DType::float16:
      return scale_vectors<Float16Codec, OnPairs<ScaleOp>>(
          destination, source, count, factor, stores);
    case DType::bfloat16:
      return scale_vectors<BFloat16Codec, OnPairs<ScaleOp>>(
          destination, source, count, factor, stores);
    default:
      return;  // integers are not scaled
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::internal::kernels {

HWY_EXPORT(scale_here);

void scale(void* destination, const void* source, size_t count, DType dtype,
           double factor, Stores stores) {
  if (std::isnan(factor)) {
    // Use a NaN without a payload, which could round to a number
    // (BFloat16Codec).
    factor = std::numeric_limits<double>::quiet_NaN();
  }
  HWY_DYNAMIC_DISPATCH(scale_here)
  (destination, source, count, dtype, factor, stores);
}

}  // namespace lockstep::internal::kernels
#endif
