#include "lockstep/parallel/ddp/buckets.h"

#include <algorithm>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace lockstep {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<NamedParameter>& parameters,
    const std::vector<size_t>& order, const BucketLimits& limits) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
    int64_t limit = 0;
  };
  // A bucket has one dtype and one device; parameters of different kinds fill
  // buckets side by side.
  std::map<std::pair<c10::ScalarType, std::string>, Open> open;
  struct Closed {
    size_t last_position;
    std::vector<size_t> members;
  };
  std::vector<Closed> closed;
  auto position_of = [&](size_t parameter) {
    return static_cast<size_t>(
        std::find(order.begin(), order.end(), parameter) - order.begin());
  };
  auto close = [&](Open& bucket) {
    size_t last = position_of(bucket.members.back());
    closed.push_back({last, std::move(bucket.members)});
    bucket = {{}, 0, limits.cap_bytes};
  };
  for (size_t index : order) {
    const auto& tensor = parameters[index].tensor;
    auto [found, fresh] =
        open.try_emplace({tensor.scalar_type(), tensor.device().str()});
    Open& bucket = found->second;
    if (fresh) bucket.limit = limits.first_bytes;
    int64_t bytes = bytes_of(tensor);
    if (!bucket.members.empty() && bucket.bytes + bytes > bucket.limit) {
      close(bucket);
    }
    bucket.members.push_back(index);
    bucket.bytes += bytes;
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.members.empty()) close(bucket);
  }
  std::ranges::sort(closed, {}, &Closed::last_position);
  std::vector<std::vector<size_t>> buckets;
  for (auto& bucket : closed) buckets.push_back(std::move(bucket.members));
  return buckets;
}

Bucket make_bucket(const std::vector<NamedParameter>& parameters,
                   const std::vector<size_t>& members,
                   const ProcessGroup& group) {
  int64_t count = 0;
  for (size_t index : members) count += parameters[index].tensor.numel();
  const auto& first = parameters[members.front()].tensor;
  auto options = first.options().requires_grad(false);
  Bucket bucket;
  auto& backend = group.backend(first.device().type());
  bucket.flat = backend.supportsTensorAlloc(first.device().index())
                    ? backend.allocateTensor(count, options)
                    : at::empty({count}, options);
  bucket.flat.zero_();
  // Below autograd and its view tracking, an alias is a tensor of its own.
  at::AutoDispatchBelowADInplaceOrView no_views;
  int64_t offset = 0;
  for (size_t index : members) {
    const auto& tensor = parameters[index].tensor;
    auto strides = tensor.is_non_overlapping_and_dense()
                       ? tensor.strides().vec()
                       : at::empty(tensor.sizes(), c10::kMeta).strides().vec();
    bucket.slots.push_back(
        {index, bucket.flat.as_strided(tensor.sizes(), strides, offset)});
    offset += tensor.numel();
  }
  return bucket;
}

bool same_memory(const at::Tensor& tensor, const at::Tensor& alias) {
  return tensor.is_alias_of(alias) && tensor.data_ptr() == alias.data_ptr() &&
         tensor.strides() == alias.strides();
}

}  // namespace lockstep
