#include "lockstep/kernels/kernels.h"
#include "lockstep/kernels/scalar_elements.h"

namespace lockstep::internal::kernels {

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

}  // namespace lockstep::internal::kernels
