#include "lockstep/parallel/ddp/gradient_check.h"

#include <ATen/ATen.h>

#include <cmath>
#include <stdexcept>

#include "lockstep/comm/agreement.h"

namespace lockstep::internal {

GradientCheck::GradientCheck(const std::vector<NamedParameter>& parameters,
                             ProcessGroupPtr group)
    : parameters_(parameters), group_(std::move(group)) {}

void GradientCheck::look(const GradientBucket& bucket) {
  if (found_ >= 0) return;
  // One value that is not finite makes the sum so: one pass if all is well. A
  // sum of finite numbers may overflow, so the parameters are checked one by
  // one then.
  const auto sum = at::real(bucket.flat.sum()).item<double>();
  if (std::isfinite(sum) && !bucket.flat.is_complex()) return;
  for (const auto& slot : bucket.slots) look(slot.parameter, slot.place);
}

void GradientCheck::look(size_t parameter, const at::Tensor& gradient) {
  if (found_ >= 0 || at::isfinite(gradient).all().item<bool>()) return;
  found_ = static_cast<int64_t>(parameter);
  is_nan_ = at::isnan(gradient).any().item<bool>();
}

void GradientCheck::agree(int64_t step) {
  const auto seen = gather_numbers(group_, {found_, int64_t{is_nan_}});
  found_ = -1;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (seen[rank][0] < 0) continue;
    throw std::runtime_error(c10::str(
        "the gradient of '", parameters_[seen[rank][0]].name, "' on rank ",
        group_->global_rank(rank), " has ",
        seen[rank][1] != 0 ? "NaN" : "infinite values", " in step ", step,
        "; the averages on all ranks are wrong now: call zero_grad() and skip "
        "the step, or load a snapshot and lower the learning rate"));
  }
}

}  // namespace lockstep::internal
