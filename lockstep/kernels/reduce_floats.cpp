#include "lockstep/kernels/reduce_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/reduce_floats.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include "lockstep/kernels/float_ops_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

template <class Op>
using AsIs = Op;

void reduce_floats_here(const ReduceCall& call) {
#if HWY_TARGET == HWY_SCALAR
  reduce_scalar(call.destinations, call.sources, call.count, call.dtype,
                call.op);
#else
  if (call.dtype == DType::float32) {
    reduce_floating<PlainCodec<float>, AsIs>(call);
  } else {
    reduce_floating<PlainCodec<double>, AsIs>(call);
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::internal::kernels {

HWY_EXPORT(reduce_floats_here);

void reduce_floats(const ReduceCall& call) {
  HWY_DYNAMIC_DISPATCH(reduce_floats_here)(call);
}

}  // namespace lockstep::internal::kernels
#endif
