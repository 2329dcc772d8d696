#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::internal {

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

}  // namespace lockstep::internal
