#include "lockstep/kernels/reduce_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/kernels/reduce_integers.cpp"
#include <hwy/foreach_target.h>
// Must come after foreach_target.h, as Highway wants it.
#include "lockstep/kernels/reduce_inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// Products wrap, so the sign makes no difference: lanes are unsigned.
struct WrappingProductOp : PlainOp {
  using PlainOp::PlainOp;

  HWY_INLINE hn::Vec<hn::ScalableTag<uint32_t>> apply(
      hn::Vec<hn::ScalableTag<uint32_t>> a,
      hn::Vec<hn::ScalableTag<uint32_t>> b) const {
    return hn::Mul(a, b);
  }

  // There is no product of bytes. The products of the even bytes are computed
  // in the lower half of 16 bits, those of the odd bytes in the upper half; for
  // these the lower half of one factor is cleared.
  HWY_INLINE hn::Vec<hn::ScalableTag<uint8_t>> apply(
      hn::Vec<hn::ScalableTag<uint8_t>> a,
      hn::Vec<hn::ScalableTag<uint8_t>> b) const {
    const hn::ScalableTag<uint16_t> d16;
    const auto a16 = hn::BitCast(d16, a);
    const auto b16 = hn::BitCast(d16, b);
    const auto low = hn::Set(d16, 0x00ff);
    const auto even = hn::And(hn::Mul(a16, b16), low);
    const auto odd = hn::Mul(hn::ShiftRight<8>(a16), hn::AndNot(low, b16));
    return hn::BitCast(hn::ScalableTag<uint8_t>(), hn::Or(even, odd));
  }

  // (ah·2^32 + al)(bh·2^32 + bl) mod 2^64 = al·bl + (ah·bl + al·bh)·2^32.
  HWY_INLINE hn::Vec<hn::ScalableTag<uint64_t>> apply(
      hn::Vec<hn::ScalableTag<uint64_t>> a,
      hn::Vec<hn::ScalableTag<uint64_t>> b) const {
    const hn::ScalableTag<uint32_t> d32;
    const hn::ScalableTag<uint64_t> d64;
    const auto a32 = hn::BitCast(d32, a);
    const auto b32 = hn::BitCast(d32, b);
    const auto cross = hn::BitCast(d64, hn::Mul(a32, hn::Reverse2(d32, b32)));
    const auto upper = hn::Add(hn::ShiftLeft<32>(cross),
                               hn::And(cross, hn::Set(d64, ~0ull << 32)));
    return hn::Add(hn::MulEven(a32, b32), upper);
  }
};

struct LeastOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Min(a, b);
  }
};

struct GreatestOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Max(a, b);
  }
};

struct AndOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::And(a, b);
  }
};

struct OrOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Or(a, b);
  }
};

struct XorOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Xor(a, b);
  }
};

// `Ordered` is for what depends on the sign, `Wrapping` for what does not.
template <typename Ordered, typename Wrapping>
void reduce_whole_numbers(const ReduceCall& call) {
  using Bytes = PlainCodec<uint8_t>;
  const size_t bytes = call.count * sizeof(Ordered);
  switch (call.op) {
    case ReduceOp::sum:
      return reduce_vectors<PlainCodec<Wrapping>, SumOp>(call, call.count);
    case ReduceOp::avg:
      return;  // is_reducible() refuses it
    case ReduceOp::product:
      return reduce_vectors<PlainCodec<Wrapping>, WrappingProductOp>(
          call, call.count);
    case ReduceOp::min:
      return reduce_vectors<PlainCodec<Ordered>, LeastOp>(call, call.count);
    case ReduceOp::max:
      return reduce_vectors<PlainCodec<Ordered>, GreatestOp>(call, call.count);
    case ReduceOp::band:
      return reduce_vectors<Bytes, AndOp>(call, bytes);
    case ReduceOp::bor:
      return reduce_vectors<Bytes, OrOp>(call, bytes);
    case ReduceOp::bxor:
      return reduce_vectors<Bytes, XorOp>(call, bytes);
  }
}

#endif

void reduce_integers_here(const ReduceCall& call) {
#if HWY_TARGET == HWY_SCALAR
  reduce_scalar(call.destinations, call.sources, call.count, call.dtype,
                call.op);
#else
  switch (call.dtype) {
    case DType::int8:
      return reduce_whole_numbers<int8_t, uint8_t>(call);
    case DType::int32:
      return reduce_whole_numbers<int32_t, uint32_t>(call);
    case DType::int64:
      return reduce_whole_numbers<int64_t, uint64_t>(call);
    default:
      return reduce_whole_numbers<uint8_t, uint8_t>(call);
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::internal::kernels {

HWY_EXPORT(reduce_integers_here);

void reduce_integers(const ReduceCall& call) {
  HWY_DYNAMIC_DISPATCH(reduce_integers_here)(call);
}

}  // namespace lockstep::internal::kernels
#endif
