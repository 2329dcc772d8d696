#include "lockstep/parallel/ddp/delayed_bucket.h"

#include <ATen/ATen.h>

#include <numeric>
#include <stdexcept>

namespace lockstep::internal {

DelayedBucket::DelayedBucket(std::vector<NamedParameter> parameters,
                             at::Tensor hook, const ProcessGroupPtr& group)
    : parameters_(std::move(parameters)),
      hook_(std::move(hook)),
      rank_(group->global_rank(group->rank())) {
  std::vector<size_t> all(parameters_.size());
  std::iota(all.begin(), all.end(), 0);
  bucket_ = make_bucket(parameters_, all, group);
  reduction_ = make_bucket_reduction({{.flat = bucket_.flat}},
                                     Results::everywhere, group);
}

void DelayedBucket::start() {
  at::NoGradGuard no_grad;
  for (auto& slot : bucket_.slots) {
    const auto& [name, tensor] = parameters_[slot.parameter];
    auto& grad = tensor.mutable_grad();
    if (!grad.defined()) {
      throw std::runtime_error(c10::str(
          "rank ", rank_, ": '", name,
          "', whose all-reduce is delayed, had no gradient yet when that of "
          "param_to_hook_all_reduce was ready; name a parameter whose gradient "
          "comes later (one nearer to the input)"));
    }
    if (!same_memory(grad, slot.place)) {
      slot.release();
      slot.place.copy_(grad);
      grad = slot.alias;
    }
  }
  if (reduction_->contribution_factor() != 1) {
    bucket_.flat.mul_(reduction_->contribution_factor());
  }
  reduction_->publish(0);
  started_ = true;
}

void DelayedBucket::finish() {
  if (!std::exchange(started_, false)) {
    throw std::runtime_error(c10::str(
        "rank ", rank_,
        ": param_to_hook_all_reduce got no gradient in a backward, so the "
        "delayed all-reduce was not started; name a parameter that every "
        "backward uses"));
  }
  reduction_->finish();
}

void DelayedBucket::give_up() {
  reduction_->abandon();
  started_ = false;
  for (const auto& slot : bucket_.slots) {
    auto& grad = parameters_[slot.parameter].tensor.mutable_grad();
    if (grad.defined() && same_memory(grad, slot.place)) grad.reset();
  }
}

void DelayedBucket::shadow() {
  at::NoGradGuard no_grad;
  for (auto& slot : bucket_.slots) {
    auto& grad = parameters_[slot.parameter].tensor.mutable_grad();
    grad.reset();
    slot.release();
    grad = slot.alias;
  }
  bucket_.flat.zero_();
  reduction_->publish(0);
  started_ = true;
}

}  // namespace lockstep::internal
