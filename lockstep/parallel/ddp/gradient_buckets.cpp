#include "lockstep/parallel/ddp/gradient_buckets.h"

#include <ATen/ATen.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal {
namespace {

// Writes `from` times `factor` into `to`, which has the same sizes.
void copy_scaled(const at::Tensor& to, const at::Tensor& from, double factor) {
  const bool same_layout = from.scalar_type() == to.scalar_type() &&
                           from.strides() == to.strides() && !from.is_neg() &&
                           !from.is_conj();
  if (factor != 1) {
    at::mul_out(const_cast<at::Tensor&>(to), from,
                at::scalar_tensor(factor, at::kDouble));
  } else if (same_layout && to.is_cpu() && to.is_non_overlapping_and_dense()) {
    // For most parameters the dispatcher costs more than the copy.
    kernels::copy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

// Returns the tensor of which `tensor` is a view; undefined if it is none.
// Autograd remembers it even if no graph is recorded, and so keeps it alive.
at::Tensor base_of(const at::Tensor& tensor) {
  auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta != nullptr && meta->has_fw_view() ? meta->get_forward_view().base_
                                                : at::Tensor();
}

// Whether nothing but this gradient uses its memory. Autograd has just made it
// of `added`, or has added that to it; apart from these two, only the tensor of
// which they are views may use the memory, and only they may refer to it.
// Otherwise its memory could also be another parameter's gradient: that of two
// parameters may be views of one result, or one of them that result.
bool uses_memory_alone(const at::Tensor& gradient, const at::Tensor& added) {
  const bool is_made_of_it = added.defined() && added.has_storage() &&
                             gradient.is_alias_of(added) &&
                             !gradient.is_same(added);
  struct User {
    at::Tensor tensor;
    size_t references;  // that are known, with that of this struct
  };
  std::vector<User> users;
  const auto refer = [&](const at::Tensor& tensor) {
    for (auto& user : users) {
      if (user.tensor.is_same(tensor)) return void(++user.references);
    }
    users.push_back({tensor, 2});
  };
  refer(gradient);                  // by the parameter
  if (is_made_of_it) refer(added);  // by autograd's list of inputs
  for (size_t i = 0, end = users.size(); i < end; ++i) {
    const auto base = base_of(users[i].tensor);
    if (base.defined() && base.is_alias_of(gradient)) refer(base);
  }
  return gradient.storage().use_count() == users.size() &&
         std::ranges::all_of(users, [](const User& user) {
           return user.tensor.use_count() == user.references;
         });
}

}  // namespace

GradientBuckets::GradientBuckets(
    const std::vector<TrainedParameter>& parameters, ProcessGroupPtr group,
    Options options)
    : group_(std::move(group)),
      options_(options),
      shared_(parameters.size()),
      places_(parameters.size()) {
  for (const auto& [named, sparse] : parameters) {
    parameters_.push_back(named);
    dtypes_.push_back(named.tensor.scalar_type());
    sparse_.push_back(sparse);
  }
}

std::vector<at::Tensor> GradientBuckets::tensors() const {
  std::vector<at::Tensor> all;
  for (const auto& parameter : parameters_) all.push_back(parameter.tensor);
  return all;
}

GradientBucket::Slot& GradientBuckets::slot(size_t parameter) {
  const auto& place = places_[parameter];
  return buckets_[place.bucket].slots[place.slot];
}

at::Tensor& GradientBuckets::grad(size_t parameter) const {
  return parameters_[parameter].tensor.mutable_grad();
}

void GradientBuckets::arrange(const std::vector<std::vector<size_t>>& members) {
  auto old_buckets = std::exchange(buckets_, {});
  for (auto& bucket : old_buckets) bucket.use_on_current_stream();
  moved_places_.clear();
  moved_.clear();
  moves_ = false;
  arena_.reset();
  std::vector<size_t> sizes;
  const auto old_places =
      std::exchange(places_, std::vector<Place>(parameters_.size()));
  for (const auto& parameters : members) {
    buckets_.push_back(make_bucket(
        parameters_, parameters, group_,
        options_.reduce_dtype.value_or(dtypes_[parameters.front()])));
    const auto& slots = buckets_.back().slots;
    size_t movables = 0;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const size_t parameter = slots[slot].parameter;
      const bool movable = is_movable(parameter);
      places_[parameter] = {buckets_.size() - 1, slot,
                            movable ? movables++ : kNone};
      if (movable) sizes.push_back(slots[slot].place.nbytes());
    }
    moved_places_.emplace_back(movables, kInBucket);
  }
  // A rank alone reduces nothing, so it has no use for an arena.
  if (!sizes.empty() && group_->size() > 1) {
    arena_ = GradientArena::make(sizes, group_);
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& old = old_places[i];
    if (old.bucket == kNone || !has_place(i) || !grad(i).defined()) continue;
    const auto& old_place = old_buckets[old.bucket].slots[old.slot].place;
    if (!same_memory(grad(i), old_place)) continue;
    const bool is_shard = is_left_shard(i, 0);
    slot(i).place.copy_(grad(i));
    grad(i) = slot(i).alias;
    if (is_shard) remember_shard(i);
  }
}

void GradientBuckets::share(size_t parameter) {
  shared_[parameter] = any_shared_ = true;
  if (!has_place(parameter) || !grad(parameter).defined()) return;
  const auto& place = slot(parameter).place;
  if (same_memory(grad(parameter), place)) grad(parameter) = place.clone();
}

void GradientBuckets::part() {
  if (!options_.views) return;
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots) {
      auto& gradient = grad(slot.parameter);
      if (!gradient.defined() || !gradient.has_storage() ||
          same_memory(gradient, slot.place)) {
        continue;
      }
      const auto address =
          reinterpret_cast<uintptr_t>(gradient.const_data_ptr());
      if (std::ranges::any_of(buckets_, [&](const GradientBucket& other) {
            const auto begin =
                reinterpret_cast<uintptr_t>(other.flat.const_data_ptr());
            return address >= begin && address - begin < other.flat.nbytes();
          })) {
        const at::NoGradGuard no_grad;
        gradient = gradient.clone();
      }
    }
  }
}

// A place in shared memory is the same for all ranks, so this must not depend
// on anything that differs between them.
bool GradientBuckets::is_movable(size_t parameter) const {
  const auto& tensor = parameters_[parameter].tensor;
  return options_.place_gradients && is_view(parameter) && tensor.is_cpu() &&
         tensor.nbytes() >= placed_bytes() &&
         at::isFloatingType(dtypes_[parameter]);
}

uint64_t& GradientBuckets::moved_place(size_t parameter) {
  const auto& place = places_[parameter];
  return moved_places_[place.bucket][place.movable];
}

bool GradientBuckets::is_moved(size_t parameter) const {
  const auto& place = places_[parameter];
  return place.movable != kNone &&
         moved_places_[place.bucket][place.movable] != kInBucket;
}

void GradientBuckets::forget_moves() {
  for (auto& places : moved_places_) {
    std::ranges::fill(places, kInBucket);
  }
  moved_.clear();
}

// Leaves the gradient where it is, if peers can reach it there and its memory
// belongs to it alone.
bool GradientBuckets::move(size_t parameter, const at::Tensor& added) {
  const auto& gradient = grad(parameter);
  const auto& to = slot(parameter).place;
  if (!moves_ || places_[parameter].movable == kNone || !is_view(parameter) ||
      gradient.requires_grad() || gradient.sizes() != to.sizes() ||
      gradient.strides() != to.strides() ||
      gradient.scalar_type() != to.scalar_type() || gradient.is_neg() ||
      gradient.is_conj() || gradient.storage_offset() != 0 ||
      c10::impl::cow::is_cow_data_ptr(gradient.storage().data_ptr()) ||
      !uses_memory_alone(gradient, added)) {
    return false;
  }
  const auto offset =
      arena_->offset_of(gradient.const_data_ptr(), gradient.nbytes());
  if (!offset) return false;
  moved_place(parameter) = *offset;
  moved_.insert_or_assign(parameter, gradient);
  return true;
}

void GradientBuckets::take(size_t parameter, double factor, bool unused,
                           const at::Tensor& added) {
  auto& slot = this->slot(parameter);
  const auto& to = slot.place;
  auto& from = grad(parameter);
  use_on_current_stream(bucket_of(parameter));
  const at::NoGradGuard no_grad;
  if (from.defined() && from.layout() != c10::kStrided) {
    throw std::runtime_error(
        "rank " + std::to_string(group_->global_rank(group_->rank())) +
        ": the gradient of '" + parameters_[parameter].name +
        "' is sparse, but its module is not an Embedding or EmbeddingBag with "
        "sparse(true); give a dense gradient (to_dense())");
  }
  if (from.defined() && from.sizes() != to.sizes()) {
    throw std::invalid_argument(c10::str(
        "rank ", group_->global_rank(group_->rank()), ": the gradient of '",
        parameters_[parameter].name, "' has the sizes ", from.sizes(),
        ", its parameter ", to.sizes(), "; call zero_grad() before backward"));
  }
  if (added.defined() && from.defined() && !unused && factor == 1 &&
      move(parameter, added)) {
    return;
  }
  const bool is_here = from.defined() && same_memory(from, to);
  // Whether other ranks used the parameter is not known yet; if none did, its
  // .grad must stay.
  if (unused && is_here) from = to.clone();
  if (unused || !is_here || !from.is_same(slot.alias)) slot.release();
  if (is_here) {
    if (factor != 1) to.mul_(factor);
  } else if (from.defined()) {
    copy_scaled(to, from, factor);
  } else {
    to.zero_();
  }
  if (!unused && is_view(parameter)) from = slot.alias;
}

void GradientBuckets::release() {
  for (auto& bucket : buckets_) {
    bucket.use_on_current_stream();
    for (auto& slot : bucket.slots) {
      auto& gradient = grad(slot.parameter);
      if (gradient.defined() && same_memory(gradient, slot.place)) {
        gradient.reset();
      }
      slot.release();
    }
  }
}

void GradientBuckets::give(size_t parameter) {
  if (is_moved(parameter)) {
    grad(parameter) = moved_.at(parameter);
    return;
  }
  const at::NoGradGuard no_grad;
  use_on_current_stream(bucket_of(parameter));
  auto& slot = this->slot(parameter);
  const auto& average = slot.place;
  auto& to = grad(parameter);
  if (is_view(parameter)) {
    if (to.is_same(slot.alias)) return;
    slot.release();
    to = slot.alias;
  } else if (options_.reduce_dtype) {
    to = average.to(dtypes_[parameter], /*non_blocking=*/false, /*copy=*/true);
  } else if (to.defined()) {
    to.copy_(average);
  } else {
    to = average.clone();
  }
}

void GradientBuckets::abandon() {
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots) {
      auto& gradient = grad(slot.parameter);
      if (gradient.defined() &&
          (is_moved(slot.parameter) || same_memory(gradient, slot.place))) {
        gradient.reset();
      }
    }
  }
}

std::vector<ReducedBucket> GradientBuckets::reduced_buckets() const {
  std::vector<ReducedBucket> reduced;
  for (const auto& bucket : buckets_) {
    auto& one = reduced.emplace_back(ReducedBucket{.flat = bucket.flat});
    for (const auto& slot : bucket.slots) {
      if (places_[slot.parameter].movable == kNone) continue;
      one.movable.push_back({slot.offset, slot.offset + slot.place.numel()});
    }
    if (owned_.empty()) continue;
    for (const auto& slot : bucket.slots) {
      const auto [begin, end] = owned_[slot.parameter];
      const auto offset = slot.offset;
      if (begin == end) continue;
      auto& ranges = one.owned;
      if (!ranges.empty() && ranges.back().end == offset + begin) {
        ranges.back().end = offset + end;
      } else {
        ranges.push_back({offset + begin, offset + end});
      }
    }
  }
  return reduced;
}

void GradientBuckets::describe(DDPLoggingData& data) const {
  data.num_parameter_tensors = static_cast<int64_t>(parameters_.size());
  for (const auto& [name, tensor] : parameters_) {
    data.total_parameter_size_bytes += static_cast<int64_t>(tensor.nbytes());
    const std::string dtype = c10::toString(tensor.scalar_type());
    if (std::ranges::find(data.dtypes, dtype) == data.dtypes.end()) {
      data.dtypes.push_back(dtype);
    }
  }
  data.num_buckets = static_cast<int64_t>(buckets_.size());
  for (const auto& bucket : buckets_) {
    data.bucket_sizes.push_back(static_cast<int64_t>(bucket.flat.nbytes()));
    auto& members = data.per_bucket_param_indices.emplace_back();
    for (const auto& slot : bucket.slots) members.push_back(slot.parameter);
  }
}

void GradientBuckets::remember_shards() {
  left_shards_.clear();
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots) remember_shard(slot.parameter);
  }
}

void GradientBuckets::remember_shard(size_t parameter) {
  const auto& gradient = grad(parameter);
  if (!gradient.defined()) return;
  left_shards_.insert_or_assign(
      parameter, LeftShard{c10::weak_intrusive_ptr<c10::TensorImpl>(
                               gradient.getIntrusivePtr()),
                           gradient._version()});
}

bool GradientBuckets::is_left_shard(size_t parameter, int changes) const {
  const auto found = left_shards_.find(parameter);
  if (found == left_shards_.end()) return false;
  const auto& [remembered, version] = found->second;
  const auto& gradient = grad(parameter);
  return gradient.defined() &&
         gradient.unsafeGetTensorImpl() == remembered._unsafe_get_target() &&
         gradient._version() == version + changes;
}

std::optional<size_t> GradientBuckets::left_shard(
    const std::function<bool(size_t)>& counts,
    std::optional<size_t> accumulated) const {
  for (const auto& [parameter, shard] : left_shards_) {
    if (is_left_shard(parameter, parameter == accumulated ? 1 : 0) &&
        counts(parameter)) {
      return parameter;
    }
  }
  return std::nullopt;
}

}  // namespace lockstep::internal
