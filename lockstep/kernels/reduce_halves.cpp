#include "lockstep/kernels/reduce_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/reduce_halves.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include "lockstep/kernels/float_ops_inl.h"
#include "lockstep/kernels/half_codecs_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

void reduce_halves_here(const ReduceCall& call) {
#if HWY_TARGET == HWY_SCALAR
  reduce_scalar(call.destinations, call.sources, call.count, call.dtype,
                call.op);
#else
  if (call.dtype == DType::float16) {
    reduce_floating<Float16Codec, OnPairs>(call);
  } else {
    reduce_floating<BFloat16Codec, OnPairs>(call);
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::internal::kernels {

HWY_EXPORT(reduce_halves_here);

void reduce_halves(const ReduceCall& call) {
  HWY_DYNAMIC_DISPATCH(reduce_halves_here)(call);
}

}  // namespace lockstep::internal::kernels
#endif
