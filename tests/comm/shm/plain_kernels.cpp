// Replaces the library's kernels with plain loops for ThreadSanitizer, which
// must see every access to the data and gains nothing from vector code.
#include <cstring>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::kernels {

void reduce(std::span<void* const> destinations,
            std::span<const void* const> sources, size_t count, DType dtype,
            ReduceOp op, Stores) {
  reduce_scalar(destinations, sources, count, dtype, op);
}

void scale(void* destination, const void* source, size_t count, DType dtype,
           double factor, Stores) {
  scale_scalar(destination, source, count, dtype, factor);
}

void copy(void* destination, const void* source, size_t bytes, Stores) {
  if (bytes != 0) std::memcpy(destination, source, bytes);
}

}  // namespace lockstep::internal::kernels
