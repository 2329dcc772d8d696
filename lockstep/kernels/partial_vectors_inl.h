// Loads and stores the first `count` lanes of a vector, for the elements that
// are left over at the end. Touches no byte past them. Included once for each
// target.
#if defined(LOCKSTEP_KERNELS_PARTIAL_VECTORS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_PARTIAL_VECTORS_INL_H_
#undef LOCKSTEP_KERNELS_PARTIAL_VECTORS_INL_H_
#else
#define LOCKSTEP_KERNELS_PARTIAL_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// AVX-512 has masks for every width; elsewhere Highway's masked access may
// read past the end for narrow elements, so it goes through a buffer.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_first(D d, const T* from, size_t count) {
  return hn::MaskedLoad(hn::FirstN(d, count), d, from);
}

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void store_first(D d, hn::Vec<D> vector, T* to, size_t count) {
  hn::BlendedStore(vector, hn::FirstN(d, count), d, to);
}

#else

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_first(D d, const T* from, size_t count) {
  alignas(64) T lanes[hn::MaxLanes(D())] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return hn::Load(d, lanes);
}

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void store_first(D d, hn::Vec<D> vector, T* to, size_t count) {
  alignas(64) T lanes[hn::MaxLanes(D())];
  hn::Store(vector, d, lanes);
  std::memcpy(to, lanes, count * sizeof(T));
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#endif
