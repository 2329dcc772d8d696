#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace lockstep {

// DistributedDataParallelOptions::mixed_precision; after _MixedPrecision of
// torch.nn.parallel.distributed. What is not given keeps its dtype.
struct MixedPrecision {
  // Of floating-point parameters, and of tensors that are arguments of
  // forward, during forward and backward.
  std::optional<at::ScalarType> param_dtype{};
  // Of gradients in their buckets; none: param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // Of floating-point buffers, from the constructor on.
  std::optional<at::ScalarType> buffer_dtype{};
};

// Floating-point parameters that are of `dtype` from lower() to restore() and
// what they were otherwise. Between the two what a graph saved of them is
// needed; an optimizer must not step. Not for several threads.
class LowPrecisionParameters {
 public:
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters,
                         at::ScalarType dtype);

  // Copies. Does nothing if they are low already; returns whether it did. Makes
  // the parameters' gradient accumulators anew, and so does restore().
  bool lower();
  void restore();

 private:
  struct Parameter {
    at::Tensor parameter;
    at::Tensor master;  // its data otherwise
    at::Tensor low;
  };
  std::vector<Parameter> parameters_;
  bool is_low_ = false;
};

// Floating-point tensors as `dtype`, anything else as it is.
at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace lockstep
