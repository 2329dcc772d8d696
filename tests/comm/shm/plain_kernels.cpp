// The kernels as plain loops, in place of the library's own, for
// ThreadSanitizer: it has to see every access to the data, and vector code is
// not worth its while.
#include <cstring>

#include "lockstep/kernels/copy.h"
#include "lockstep/kernels/reduce.h"
#include "lockstep/kernels/scalar_elements.h"
#include "lockstep/kernels/scale.h"

namespace lockstep::kernels {

void reduce(std::span<void* const> destinations,
            std::span<const void* const> sources, size_t count, DType dtype,
            ReduceOp op, Stores) {
  reduce_scalar(destinations, sources, count, dtype, op);
}

void scale(void* destination, const void* source, size_t count, DType dtype,
           double factor, Stores) {
  scale_scalar(destination, source, count, dtype, factor);
}

// The library's own stands with the vectors.
void scale_scalar(void* destination, const void* source, size_t count,
                  DType dtype, double factor) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    using Value = typename Element::Value;
    using Stored = typename Element::Stored;
    for (size_t i = 0; i < count; ++i) {
      const Value value = Element::load(static_cast<const Stored*>(source)[i]);
      static_cast<Stored*>(destination)[i] = Element::store(
          static_cast<Value>(value * static_cast<Value>(factor)));
    }
  });
}

void copy(void* destination, const void* source, size_t bytes, Stores) {
  if (bytes != 0) std::memcpy(destination, source, bytes);
}

}  // namespace lockstep::kernels
