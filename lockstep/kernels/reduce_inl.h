// The loop of all reductions. Included once for each target by each family of
// types.
//
// A Codec says how elements are stored and computed:
//   Tag               tag of a stored vector
//   Wide              the vector (or two) that is computed with
//   kVectors          stored vectors a block, as many as the registers hold
//   decode, encode    from stored to Wide and back
// An Op combines Wides: prepare() is first applied to that of each source, and
// finish() to the result.
#if defined(LOCKSTEP_KERNELS_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_REDUCE_INL_H_
#undef LOCKSTEP_KERNELS_REDUCE_INL_H_
#else
#define LOCKSTEP_KERNELS_REDUCE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "lockstep/kernels/partial_vectors_inl.h"
#include "lockstep/kernels/reduce_dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::internal::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct PlainCodec {
  using Tag = hn::ScalableTag<T>;
  using Wide = hn::Vec<Tag>;
  static constexpr size_t kVectors = 8;
  static HWY_INLINE Wide decode(hn::Vec<Tag> stored) { return stored; }
  static HWY_INLINE hn::Vec<Tag> encode(Wide wide) { return wide; }
};

template <class Codec, class Op>
class Reduction {
 public:
  Reduction(std::span<void* const> destinations,
            std::span<const void* const> sources, Op op)
      : destinations_(destinations), sources_(sources), op_(op) {}

  void run(size_t count, Stores stores) {
    constexpr size_t kBlock = Codec::kVectors * kLanes;
    size_t i = 0;
    if (count >= 4 * kBlock) {
      i = align_destination();
      if (stores == Stores::streaming) {
        choose_streamed(i);
      }
    }
    for (; count - i >= kBlock; i += kBlock) {
      block(i, std::make_index_sequence<Codec::kVectors>());
    }
    for (; count - i >= kLanes; i += kLanes) {
      block(i, std::make_index_sequence<1>());
    }
    if (i < count) {
      partial(i, count - i);
    }
    if (stores == Stores::streaming) {
      hwy::FlushStream();
    }
  }

 private:
  using Tag = typename Codec::Tag;
  using T = hn::TFromD<Tag>;
  using Wide = typename Codec::Wide;
  using Stored = hn::Vec<Tag>;
  static constexpr size_t kLanes = hn::MaxLanes(Tag());
  static constexpr size_t kVectorBytes = kLanes * sizeof(T);

  const T* source(size_t s) const { return static_cast<const T*>(sources_[s]); }
  T* destination(size_t d) const { return static_cast<T*>(destinations_[d]); }

  // Computes the first elements, up to where the first destination is aligned
  // to a vector: stores that cross a cache line cost twice, and streaming
  // stores must not cross one. Returns the number of these elements.
  HWY_INLINE size_t align_destination() {
    const size_t past =
        reinterpret_cast<uintptr_t>(destination(0)) % kVectorBytes;
    if (past == 0 || past % sizeof(T) != 0) {
      return 0;
    }
    const size_t head = (kVectorBytes - past) / sizeof(T);
    partial(0, head);
    return head;
  }

  HWY_INLINE void choose_streamed(size_t first) {
    for (size_t d = 0; d < destinations_.size(); ++d) {
      const auto address = reinterpret_cast<uintptr_t>(destination(d) + first);
      streamed_ |= uint64_t{address % kVectorBytes == 0} << d;
    }
  }

  // All loads stand before the first store: a destination may be a source.
  template <size_t... I>
  HWY_INLINE void block(size_t i, std::index_sequence<I...>) const {
    const Tag tag;
    const T* from = source(0) + i;
    Wide wide[] = {
        op_.prepare(Codec::decode(hn::LoadU(tag, from + I * kLanes)))...};
    for (size_t s = 1; s < sources_.size(); ++s) {
      from = source(s) + i;
      ((wide[I] = op_.apply(wide[I], op_.prepare(Codec::decode(
                                         hn::LoadU(tag, from + I * kLanes))))),
       ...);
    }
    const Stored stored[] = {Codec::encode(op_.finish(wide[I]))...};
    for (size_t d = 0; d < destinations_.size(); ++d) {
      T* to = destination(d) + i;
      if (streamed_ >> d & 1) {
        (hn::Stream(stored[I], tag, to + I * kLanes), ...);
      } else {
        (hn::StoreU(stored[I], tag, to + I * kLanes), ...);
      }
    }
  }

  HWY_NOINLINE void partial(size_t i, size_t count) const {
    const Tag tag;
    Wide wide =
        op_.prepare(Codec::decode(load_first(tag, source(0) + i, count)));
    for (size_t s = 1; s < sources_.size(); ++s) {
      wide = op_.apply(
          wide,
          op_.prepare(Codec::decode(load_first(tag, source(s) + i, count))));
    }
    const Stored stored = Codec::encode(op_.finish(wide));
    for (size_t d = 0; d < destinations_.size(); ++d) {
      store_first(tag, stored, destination(d) + i, count);
    }
  }

  std::span<void* const> destinations_;
  std::span<const void* const> sources_;
  uint64_t streamed_ = 0;  // one bit for each destination
  Op op_;
};

template <class Codec, class Op>
HWY_NOINLINE void reduce_vectors(const ReduceCall& call, size_t count) {
  Reduction<Codec, Op>(call.destinations, call.sources, Op(call.sources.size()))
      .run(count, call.stores);
}

// The base of most operations: nothing to prepare or to finish.
struct PlainOp {
  explicit PlainOp(size_t) {}
  template <class V>
  HWY_INLINE V prepare(V v) const {
    return v;
  }
  template <class V>
  HWY_INLINE V finish(V v) const {
    return v;
  }
};

struct SumOp : PlainOp {
  using PlainOp::PlainOp;
  template <class V>
  HWY_INLINE V apply(V a, V b) const {
    return hn::Add(a, b);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace lockstep::internal::kernels
HWY_AFTER_NAMESPACE();

#endif
