#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace lockstep {

// DistributedDataParallelOptions::mixed_precision; after _MixedPrecision of
// torch.nn.parallel.distributed. What is not given keeps its dtype.
struct MixedPrecision {
  // Of floating-point parameters, and of tensors that are arguments of
  // forward, while forward and backward run; at any other time parameters are
  // what they were, so that grad() with respect to them finds none in the
  // graph.
  std::optional<at::ScalarType> param_dtype{};
  // Of gradients in their buckets; none: param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // Of floating-point buffers, from the constructor on.
  std::optional<at::ScalarType> buffer_dtype{};
};

// Floating-point parameters that are of `dtype` while forward or backward works
// with them, and what they were at any other time. Not for several threads.
class LowPrecisionParameters {
 public:
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters,
                         at::ScalarType dtype);

  // For a forward: casts the parameters. For its backward: takes the last
  // forward's casts. Calls nest: restore() belongs to each, and the outermost
  // counts. Both ways LibTorch forgets the parameters' gradient accumulators.
  void lower_for_forward() { lower(/*casts=*/true); }
  void lower_for_backward() { lower(/*casts=*/false); }
  void restore();
  bool is_low() const { return depth_ > 0; }

 private:
  struct Parameter {
    at::Tensor parameter;
    at::Tensor master;  // its data otherwise
    at::Tensor low;
  };
  void lower(bool casts);

  std::vector<Parameter> parameters_;
  int depth_ = 0;
};

// Floating-point tensors as `dtype`, anything else as it is.
at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace lockstep
