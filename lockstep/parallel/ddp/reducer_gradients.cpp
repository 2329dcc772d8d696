// How gradients come into their buckets.
#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

#include "lockstep/comm/host_sharing.h"
#include "lockstep/kernels/copy.h"
#include "lockstep/parallel/ddp/reducer.h"

namespace lockstep {
namespace {

// `from`, times `factor`, into `to` of the same sizes.
void copy_scaled(const at::Tensor& to, const at::Tensor& from, double factor) {
  const bool same_layout = from.scalar_type() == to.scalar_type() &&
                           from.strides() == to.strides() && !from.is_neg() &&
                           !from.is_conj();
  if (factor != 1) {
    at::mul_out(const_cast<at::Tensor&>(to), from,
                at::scalar_tensor(factor, at::kDouble));
  } else if (same_layout && to.is_cpu() && to.is_non_overlapping_and_dense()) {
    // What the dispatcher costs is more than most parameters do.
    kernels::copy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

}  // namespace

// Where the ranks share memory, so that nothing has to be multiplied in passing
// and the layout of the buckets is our own affair; hooks see it, too.
bool Reducer::places_gradients() const {
  return group_->size() > 1 && host_sharing(group_) != nullptr && !hook_ &&
         grads_are_aliases() && !options_.batched_grad_copy;
}

void Reducer::place_gradients() {
  std::vector<GradientPlacement::Slot> slots;
  if (places_gradients()) {
    for (const auto& bucket : buckets_) {
      for (const auto& [parameter, offset, alias] : bucket.slots) {
        if (!alias.is_cpu()) continue;
        slots.push_back({parameter, parameters_[parameter].tensor, alias,
                         bucket.flat, hooks_[parameter].accumulator.get()});
      }
    }
  }
  placement_.set_slots(slots, parameters_.size());
}

// Brings the parameter's gradient into its bucket.
bool Reducer::take_gradient(size_t parameter) {
  const auto& place = places_[parameter];
  const auto& alias = buckets_[place.bucket].slots[place.slot].alias;
  auto& grad = parameters_[parameter].tensor.mutable_grad();
  at::NoGradGuard no_grad;
  if (grad.defined() && grad.layout() != c10::kStrided) {
    throw std::runtime_error(
        this_rank() + ": the gradient of '" + parameters_[parameter].name +
        "' is sparse, though its module is no Embedding or EmbeddingBag with "
        "sparse(true); give a dense gradient (to_dense())");
  }
  if (grad.defined() && same_memory(grad, alias)) {
    if (factor_ != 1) alias.mul_(factor_);
  } else if (placement_.held(parameter)) {
    displaced_.push_back({parameter, {}});
    return false;
  } else if (grad.defined()) {
    copy_scaled(alias, grad, factor_);
  } else {
    alias.zero_();
    // Of one that is unused it is not known yet whether others used it.
    if (place.unused) return true;
  }
  if (grads_are_aliases()) grad = alias;
  return true;
}

// What stands in a slot is saved, for as long as the reduction needs the place.
void Reducer::take_displaced() {
  if (displaced_.empty()) return;
  at::NoGradGuard no_grad;
  for (auto& [parameter, tenant] : displaced_) {
    const auto& place = places_[parameter];
    const auto& alias = buckets_[place.bucket].slots[place.slot].alias;
    auto& grad = parameters_[parameter].tensor.mutable_grad();
    tenant = alias.clone();
    if (!grad.defined()) {
      alias.zero_();
      if (!place.unused) grad = alias;
    } else {
      // The gradient itself, in another layout than the parameter's.
      const bool stands_here = grad.const_data_ptr() == alias.const_data_ptr();
      copy_scaled(alias, stands_here ? grad.clone() : grad, factor_);
      grad = alias;
    }
    placement_.withdraw(parameter);
    --pending_[place.bucket];
  }
  publish_ready_buckets();
}

void Reducer::restore_displaced() {
  at::NoGradGuard no_grad;
  for (const auto& [parameter, tenant] : displaced_) {
    const auto& place = places_[parameter];
    const auto& alias = buckets_[place.bucket].slots[place.slot].alias;
    auto& grad = parameters_[parameter].tensor.mutable_grad();
    if (grad.defined() && same_memory(grad, alias)) grad = alias.clone();
    alias.copy_(tenant);
  }
}

// The same for all of a bucket, with one call for the copies.
void Reducer::take_batch(const Bucket& bucket) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> aliases;
  std::vector<at::Tensor> grads;
  for (const auto& slot : bucket.slots) {
    auto& grad = parameters_[slot.parameter].tensor.mutable_grad();
    if (!grad.defined() || grad.layout() != c10::kStrided) {
      take_gradient(slot.parameter);
    } else if (!same_memory(grad, slot.alias)) {
      aliases.push_back(slot.alias);
      grads.push_back(grad);
      if (grads_are_aliases()) grad = slot.alias;
    }
  }
  if (!aliases.empty()) at::_foreach_copy_(aliases, grads);
  if (factor_ != 1) bucket.flat.mul_(factor_);
}

// Of what is averaged in shards a rank has its own only: a backward that adds
// to the rest adds to garbage. That nobody has zeroed or otherwise written to a
// gradient since is seen by its version.
void Reducer::remember_shards() {
  left_shards_.clear();
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots) remember_shard(slot.parameter);
  }
}

void Reducer::remember_shard(size_t parameter) {
  const auto& grad = parameters_[parameter].tensor.grad();
  if (!grad.defined()) return;
  left_shards_.insert_or_assign(
      parameter, LeftShard{c10::weak_intrusive_ptr<c10::TensorImpl>(
                               grad.getIntrusivePtr()),
                           grad._version()});
}

// `changes`: of the gradient by the backward that is under way.
bool Reducer::is_left_shard(size_t parameter, int changes) const {
  const auto found = left_shards_.find(parameter);
  if (found == left_shards_.end()) return false;
  const auto& [gradient, version] = found->second;
  const auto& grad = parameters_[parameter].tensor.grad();
  // The memory of a tensor is not another's while it is remembered.
  return grad.defined() &&
         grad.unsafeGetTensorImpl() == gradient._unsafe_get_target() &&
         grad._version() == version + changes;
}

// `first`: whose gradient this backward has accumulated first.
void Reducer::refuse_left_shards(size_t first) {
  for (const auto& [parameter, shard] : left_shards_) {
    if (!is_left_shard(parameter, parameter == first ? 1 : 0) ||
        !is_stepped_(parameter)) {
      continue;
    }
    const auto name = parameters_[parameter].name;
    give_up_backward();
    left_shards_.clear();
    throw std::logic_error(
        this_rank() + ": the gradient of '" + name +
        "' still stands from the backward before; what a sharded optimizer "
        "steps is averaged only in each rank's part, so that nothing can be "
        "added to it: call zero_grad() before the next backward, and "
        "accumulate under no_sync() before the one that averages");
  }
  left_shards_.clear();
}

}  // namespace lockstep
