#include "lockstep/parallel/ddp/buckets.h"

#include <algorithm>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "lockstep/comm/empty_shared.h"

namespace lockstep::internal {

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
  bucket.flat.zero_();
  // Below autograd and its tracking of views, an alias is a plain tensor.
  at::AutoDispatchBelowADInplaceOrView no_views;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto& tensor = parameters[members[i]].tensor;
    auto strides = tensor.is_non_overlapping_and_dense()
                       ? tensor.strides().vec()
                       : at::empty(tensor.sizes(), c10::kMeta).strides().vec();
    bucket.slots.push_back(
        {members[i], offsets[i],
         bucket.flat.as_strided(tensor.sizes(), strides, offsets[i])});
  }
  return bucket;
}

bool same_memory(const at::Tensor& tensor, const at::Tensor& alias) {
  return tensor.has_storage() &&  // not sparse
         tensor.const_data_ptr() == alias.const_data_ptr() &&
         tensor.sizes() == alias.sizes() &&
         tensor.strides() == alias.strides() &&
         tensor.scalar_type() == alias.scalar_type() &&
         tensor.is_conj() == alias.is_conj() &&
         tensor.is_neg() == alias.is_neg();
}

}  // namespace lockstep::internal
