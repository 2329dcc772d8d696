#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace lockstep {

// DistributedDataParallelOptions::mixed_precision; like _MixedPrecision of
// torch.nn.parallel.distributed. Without a value the dtype stays as it is.
struct MixedPrecision {
  // The dtype of floating-point parameters, and of tensors that are arguments
  // of forward, while forward and backward run. At any other time parameters
  // have their own dtype, so grad() with respect to them does not find them in
  // the graph.
  std::optional<at::ScalarType> param_dtype{};
  // The dtype of gradients in their buckets; none means param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // The dtype of floating-point buffers, from the constructor on.
  std::optional<at::ScalarType> buffer_dtype{};
};

}  // namespace lockstep
