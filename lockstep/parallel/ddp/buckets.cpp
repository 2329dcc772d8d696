#include "lockstep/parallel/ddp/buckets.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/group_inside.h"

namespace lockstep::internal {

bool all_on_cpu(const std::vector<NamedParameter>& parameters) {
  return std::ranges::all_of(parameters, [](const NamedParameter& parameter) {
    return parameter.tensor.is_cpu();
  });
}

std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& order,
    const BucketLimits& limits) {
  struct Run {
    std::vector<size_t> members;
    int64_t bytes;
    size_t limit;  // index in `limits`
    size_t last_position;
  };
  // A bucket has one dtype and one device; tensors of different kinds fill
  // buckets side by side.
  std::map<std::pair<c10::ScalarType, std::string>, Run> open;
  std::vector<Run> ended;
  for (size_t position = 0; position < order.size(); ++position) {
    const auto& tensor = tensors[order[position]];
    auto [found, fresh] = open.try_emplace(
        {tensor.scalar_type(), tensor.device().str()},
        Run{.members = {}, .bytes = 0, .limit = 0, .last_position = 0});
    Run& run = found->second;
    run.members.push_back(order[position]);
    run.bytes += static_cast<int64_t>(tensor.nbytes());
    run.last_position = position;
    if (run.bytes >= limits[run.limit]) {
      const auto next = std::min(run.limit + 1, limits.size() - 1);
      ended.push_back(std::move(run));
      run = {.members = {}, .bytes = 0, .limit = next, .last_position = 0};
    }
  }
  for (auto& [kind, run] : open) {
    if (!run.members.empty()) ended.push_back(std::move(run));
  }
  std::ranges::sort(ended, {}, &Run::last_position);
  std::vector<std::vector<size_t>> buckets;
  for (auto& run : ended) buckets.push_back(std::move(run.members));
  return buckets;
}

GradientBucket make_bucket(const std::vector<NamedParameter>& parameters,
                           const std::vector<size_t>& members,
                           const ProcessGroupPtr& group,
                           std::optional<at::ScalarType> dtype) {
  const auto& first = parameters[members.front()].tensor;
  auto options = first.options().requires_grad(false);
  if (dtype) options = options.dtype(dtype);
  int64_t count = 0;
  std::vector<int64_t> offsets;
  for (size_t index : members) {
    offsets.push_back(count);
    count += parameters[index].tensor.numel();
  }
  GradientBucket bucket;
  bucket.flat = empty_shared({count}, options, group);
  bucket.stream = current_stream(bucket.flat.device());
  // A process that takes a place makes its buckets again before it uses them,
  // and memory that is not touched costs it no time.
  if (!inside(group).is_apart()) bucket.flat.zero_();
  // Below autograd and its tracking of views, these are plain tensors.
  at::AutoDispatchBelowADInplaceOrView no_views;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto& tensor = parameters[members[i]].tensor;
    auto strides = tensor.is_non_overlapping_and_dense()
                       ? tensor.strides().vec()
                       : at::empty(tensor.sizes(), c10::kMeta).strides().vec();
    auto& slot = bucket.slots.emplace_back(GradientBucket::Slot{
        .parameter = members[i],
        .offset = offsets[i],
        .place = bucket.flat.as_strided(tensor.sizes(), strides, offsets[i]),
        .alias = {},
        .storage = {}});
    slot.release();
  }
  return bucket;
}

void GradientBucket::Slot::release() {
  constexpr size_t kOwn = 2;  // references to the storage: ours and the alias's
  const bool is_pristine = alias.defined() && same_memory(alias, place) &&
                           !alias.requires_grad() &&
                           alias.storage().is_alias_of(storage);
  if (is_pristine && alias.use_count() == 1 && storage.use_count() == kOwn) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (alias.defined()) {
    auto copy = place.clone();  // as dense as `place`
    storage.set_data_ptr_noswap(
        copy.storage().set_data_ptr(c10::DataPtr(nullptr, place.device())));
  }
  const auto device = place.device();
  storage = c10::Storage(
      c10::Storage::use_byte_size_t(), place.nbytes(),
      c10::DataPtr(
          place.mutable_data_ptr(), new at::Tensor(place),
          [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device),
      c10::GetAllocator(device.type()), /*resizable=*/true);
  at::AutoDispatchBelowADInplaceOrView no_views;
  alias = at::empty({0}, place.options());
  alias.set_(storage, 0, place.sizes(), place.strides());
}

void GradientBucket::use_on_current_stream() {
  const auto current = current_stream(flat.device());
  if (current == stream) return;
  await_stream(*current, *stream);
  keep_for_current_stream(flat);
  stream = current;
}

bool same_memory(const at::Tensor& tensor, const at::Tensor& place) {
  return tensor.has_storage() &&  // not sparse
         tensor.const_data_ptr() == place.const_data_ptr() &&
         tensor.sizes() == place.sizes() &&
         tensor.strides() == place.strides() &&
         tensor.scalar_type() == place.scalar_type() &&
         tensor.is_conj() == place.is_conj() &&
         tensor.is_neg() == place.is_neg();
}

std::vector<std::vector<size_t>> first_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& members,
    const BucketLimits& limits) {
  const BucketLimits none{std::numeric_limits<int64_t>::max()};
  auto buckets =
      assign_buckets(tensors, members, limits.empty() ? none : limits);
  std::ranges::sort(buckets, std::greater());  // by their first parameter
  return buckets;
}

std::vector<std::vector<size_t>> order_of_rank_zero(
    const std::vector<std::vector<size_t>>& buckets, c10::Device device,
    const ProcessGroupPtr& group) {
  if (group->size() == 1) return buckets;
  auto from_rank_zero = [&](const std::vector<int>& numbers) {
    auto sent = at::tensor(numbers, at::kInt).to(device);
    broadcast(sent, group->global_ranks()[0], {.group = group});
    sent = sent.cpu();
    const auto* data = sent.const_data_ptr<int>();
    return std::vector<int>(data, data + sent.numel());
  };
  std::vector<int> members;
  std::vector<int> lengths;
  for (const auto& bucket : buckets) {
    for (size_t index : bucket) members.push_back(static_cast<int>(index));
    lengths.push_back(static_cast<int>(bucket.size()));
  }
  members.push_back(static_cast<int>(buckets.size()));
  members = from_rank_zero(members);
  lengths.resize(members.back());
  lengths = from_rank_zero(lengths);
  std::vector<std::vector<size_t>> agreed;
  auto next = members.begin();
  for (int length : lengths) {
    agreed.emplace_back(next, next + length);
    next += length;
  }
  return agreed;
}

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
