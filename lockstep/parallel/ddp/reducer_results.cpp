// What the reducer does at the end of a backward, and what it tells of itself.
#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/parallel/ddp/reducer.h"

namespace lockstep {

void Reducer::finish_sparse() {
  at::NoGradGuard no_grad;
  sparse_missing_.assign(parameters_.size(), false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!sparse_[i]) continue;
    const auto& [name, tensor] = parameters_[i];
    auto& grad = tensor.mutable_grad();
    sparse_missing_[i] = !grad.defined();
    auto sum =
        shadows_ || !grad.defined()
            ? at::zeros(
                  tensor.sizes(),
                  tensor.options().requires_grad(false).layout(c10::kSparse))
        : grad.is_sparse() ? grad.coalesce()
                           : grad.to_sparse();
    if (check_) check_->look(i, sum._values());
    if (options_.reduce_dtype) sum = sum.to(*options_.reduce_dtype);
    if (group_->size() > 1) {
      sum = at::mul(sum, at::scalar_tensor(1 / divisor_, at::kDouble));
      all_reduce(sum, {.group = group_});
    }
    grad = sum.to(dtypes_[i]);
  }
}

// Which parameters some rank used. The others keep what gradient they had.
void Reducer::finish_used_map() {
  auto map = at::tensor(used_, at::kInt);
  if (group_->size() > 1) {
    auto reduced = map.to(group_->control_device());
    all_reduce(reduced, {.group = group_});
    map = reduced.cpu();
  }
  const auto* counts = map.const_data_ptr<int>();
  unused_everywhere_.assign(parameters_.size(), false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    unused_everywhere_[i] = counts[i] == 0;
    if (sparse_[i] && unused_everywhere_[i] && sparse_missing_[i]) {
      parameters_[i].tensor.mutable_grad().reset();
    }
  }
  if (!shadows_) {
    used_differently_ |= !last_used_.empty() && last_used_ != used_;
    last_used_ = used_;
  }
  std::ranges::fill(used_, 0);
}

bool Reducer::grads_are_aliases() const {
  return options_.gradient_as_bucket_view && !options_.reduce_dtype;
}

// Hands the results of the buckets before `final_buckets` out.
void Reducer::deliver(size_t final_buckets) {
  const bool nothing_to_do = grads_are_aliases() && !on_final_ &&
                             !needs_used_map() && !shadows_ &&
                             !options_.static_graph;
  if (nothing_to_do) return;
  at::NoGradGuard no_grad;
  std::vector<size_t> final_parameters;
  for (; delivered_ < final_buckets; ++delivered_) {
    final_parameters.clear();
    for (const auto& [parameter, offset, alias] : buckets_[delivered_].slots) {
      if (!unused_everywhere_.empty() && unused_everywhere_[parameter]) {
        continue;
      }
      auto& grad = parameters_[parameter].tensor.mutable_grad();
      if (grads_are_aliases()) {
        grad = alias;
      } else if (options_.reduce_dtype) {
        grad = alias.to(dtypes_[parameter]);
      } else if (grad.defined()) {
        grad.copy_(alias);
      } else {
        grad = alias.clone();
      }
      final_parameters.push_back(parameter);
    }
    if (on_final_) on_final_(final_parameters);
  }
}

void Reducer::deliver_sparse() {
  if (!on_final_) return;
  std::vector<size_t> final_parameters;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (sparse_[i] && parameters_[i].tensor.grad().defined()) {
      final_parameters.push_back(i);
    }
  }
  if (!final_parameters.empty()) on_final_(final_parameters);
}

void Reducer::shadow_backward() {
  std::lock_guard lock(mutex_);
  shadows_ = true;
  try {
    start_round();
    at::NoGradGuard no_grad;
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      for (const auto& [parameter, offset, alias] : buckets_[bucket].slots) {
        if (placement_.held(parameter)) {
          displaced_.push_back({parameter, alias.clone()});
        }
      }
      buckets_[bucket].flat.zero_();
      reduction_->publish(bucket);
    }
    if (delayed_) delayed_->shadow(divisor_);
    finish();
  } catch (...) {
    shadows_ = false;
    throw;
  }
  shadows_ = false;
}

std::string Reducer::names_without_gradient() const {
  constexpr int kMostNames = 5;
  std::string names;
  int count = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (places_[i].ready) continue;
    if (++count <= kMostNames) {
      names += (names.empty() ? "'" : ", '") + parameters_[i].name + "'";
    }
  }
  if (count > kMostNames) {
    names += " and " + std::to_string(count - kMostNames) + " more";
  }
  return names;
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : buckets_) {
    auto& list = names.emplace_back();
    for (const auto& slot : bucket.slots) {
      list.push_back(parameters_[slot.parameter].name);
    }
  }
  return names;
}

void Reducer::describe(DDPLoggingData& data) const {
  std::lock_guard lock(mutex_);
  data.bucket_cap_bytes = options_.limits;
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  data.static_graph = options_.static_graph;
  data.comm_hook = hook_ ? "user" : "allreduce";
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
  data.has_rebuilt_buckets = rebuilt_;
  data.prev_iteration_grad_ready_order_indices = last_ready_order_;
  for (size_t i = 0; i < unused_everywhere_.size(); ++i) {
    if (unused_everywhere_[i]) {
      data.unused_parameter_size +=
          static_cast<int64_t>(parameters_[i].tensor.nbytes());
    }
  }
  data.can_set_static_graph = options_.static_graph || !used_differently_;
  times_.describe(data);
  data.iteration = steps();
}

}  // namespace lockstep
