#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace lockstep {

// DistributedDataParallelOptions::mixed_precision; like _MixedPrecision of
// torch.nn.parallel.distributed. Without a value the dtype stays as it is.
struct MixedPrecision {
  // The dtype of floating-point parameters, and of tensors that are arguments
  // of forward, while forward and backward run. At any other time parameters
  // have their own dtype, so grad() with respect to them does not find them in
  // the graph.
  std::optional<at::ScalarType> param_dtype{};
  // The dtype of gradients in their buckets; none: param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // The dtype of floating-point buffers, from the constructor on.
  std::optional<at::ScalarType> buffer_dtype{};
};

// Floating-point parameters that have `dtype` while forward or backward uses
// them, and their own dtype at any other time. One thread at a time.
class LowPrecisionParameters {
 public:
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters,
                         at::ScalarType dtype);

  // lower_for_forward() casts the parameters; lower_for_backward() uses the
  // casts of the last forward. Calls nest: each needs its restore(), and only
  // the outermost has an effect. Both directions make LibTorch drop the
  // parameters' gradient accumulators.
  void lower_for_forward() { lower(/*casts=*/true); }
  void lower_for_backward() { lower(/*casts=*/false); }
  void restore();
  bool is_low() const { return depth_ > 0; }

 private:
  struct Parameter {
    at::Tensor parameter;
    at::Tensor master;  // its data at other times
    at::Tensor low;
  };
  void lower(bool casts);

  std::vector<Parameter> parameters_;
  int depth_ = 0;
};

// Casts floating-point tensors to `dtype`, and returns others unchanged.
at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace lockstep
