#include "lockstep/parallel/ddp/bucket_order.h"

#include <algorithm>
#include <functional>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/comm/collectives.h"

namespace lockstep::internal {

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

}  // namespace lockstep::internal
