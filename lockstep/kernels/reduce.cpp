#include "lockstep/kernels/kernels.h"

#include "lockstep/kernels/reduce_dispatch.h"

namespace lockstep::internal::kernels {

void reduce(std::span<void* const> destinations,
            std::span<const void* const> sources, size_t count, DType dtype,
            ReduceOp op, Stores stores) {
  const ReduceCall call{.destinations = destinations,
                        .sources = sources,
                        .count = count,
                        .dtype = dtype,
                        .op = op,
                        .stores = stores};
  switch (dtype) {
    case DType::float32:
    case DType::float64:
      return reduce_floats(call);
    case DType::float16:
    case DType::bfloat16:
      return reduce_halves(call);
    case DType::int8:
    case DType::uint8:
    case DType::int32:
    case DType::int64:
    case DType::boolean:
      return reduce_integers(call);
  }
}

}  // namespace lockstep::internal::kernels
