#include "lockstep/metrics/metric.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <sstream>
#include <stdexcept>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/state/digest.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::metrics {

Metric::Metric(const char* function, std::string kind, int64_t count,
               const ProcessGroupPtr& group)
    : function_(function),
      kind_(std::move(kind)),
      count_(count),
      group_(group.require_member()) {}

at::Tensor Metric::sums_on(const at::Device& device) {
  for (const at::Tensor& sums : sums_) {
    if (sums.device() == device) return sums;
  }
  // update() may be called in inference mode and outside of it.
  const c10::InferenceMode no_inference(false);
  return sums_.emplace_back(at::zeros(
      {count_}, at::TensorOptions().dtype(at::kDouble).device(device)));
}

void Metric::require_real(const char* metric, const at::Tensor& values) {
  if (!values.is_complex()) return;
  throw std::invalid_argument(
      std::string(metric) + ": the values are of " +
      c10::toString(values.scalar_type()) +
      "; give real ones, such as at::real(values) and at::imag(values)");
}

void Metric::add(int64_t index, double value) {
  sums_on(at::kCPU).mutable_data_ptr<double>()[index] += value;
}

void Metric::add(int64_t index, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  sums_on(value.device())[index].add_(value.detach());
}

at::Tensor Metric::state_dict() const {
  at::Tensor total = at::zeros({count_}, at::kDouble);
  for (const at::Tensor& sums : sums_) total += sums.cpu();
  return total;
}

void Metric::load_state_dict(const at::Tensor& state) {
  if (state.scalar_type() != at::kDouble || state.dim() != 1 ||
      state.size(0) != count_) {
    std::ostringstream text;
    text << kind_ << ": the state is a tensor of " << state.scalar_type() << " "
         << state.sizes()
         << "; give what state_dict() of such a metric returned, "
         << "float64 [" << count_ << "]";
    throw std::invalid_argument(text.str());
  }
  reset();
  sums_on(at::kCPU).copy_(state.detach());
}

at::Tensor Metric::reduce() const {
  const internal::UserFunction function(function_);
  const at::Tensor own = state_dict();
  const ProcessGroupPtr group = internal::group_if_any(group_);
  if (!group || group->size() == 1) return own;
  // An Agreement would be a second collective, so the kind travels with the
  // sums. All ranks have the same kind if and only if the mean of the squares
  // is the square of the mean. 20 bits keep these sums exact on 2^13 ranks.
  internal::Digest digest;
  digest.add(kind_);
  const auto kind = static_cast<double>(digest.value() & 0xfffff);
  at::Tensor sums = at::cat({own, at::tensor({kind, kind * kind}, at::kDouble)})
                        .to(group->control_device());
  all_reduce(sums, {.group = group});
  sums = sums.cpu();
  const auto* numbers = sums.const_data_ptr<double>();
  const double sum = numbers[count_];
  if (sum * sum != numbers[count_ + 1] * group->size()) {
    throw std::invalid_argument(
        "the ranks computed different metrics at the same time, on this rank " +
        kind_ +
        "; all ranks must call compute() of the same metrics, with the "
        "same options, in the same order");
  }
  return sums.narrow(0, 0, count_);
}

}  // namespace lockstep::metrics
