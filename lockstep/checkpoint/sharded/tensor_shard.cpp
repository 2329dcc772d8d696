#include "lockstep/checkpoint/sharded/tensor_shard.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lockstep::internal {
namespace {

Sizes permuted(const Sizes& sizes, const Sizes& order) {
  Sizes result;
  for (const int64_t d : order) result.push_back(sizes[static_cast<size_t>(d)]);
  return result;
}

Sizes inverse(const Sizes& order) {
  Sizes result(order.size());
  for (size_t d = 0; d < order.size(); ++d) {
    result[static_cast<size_t>(order[d])] = static_cast<int64_t>(d);
  }
  return result;
}

void require_fit(bool fits, const TensorShard& shard) {
  if (fits) return;
  throw std::invalid_argument(
      "the part of tensor \"" + shard.name +
      "\" that this rank gave does not have the shape that its placement (" +
      text_of(shard.placement) + ") needs");
}

}  // namespace

std::string text_of(const Placement& placement) {
  if (std::holds_alternative<Replicate>(placement)) return "replicate";
  return std::holds_alternative<Shard>(placement) ? "shard" : "flat";
}

Sizes memory_order(const at::Tensor& tensor) {
  Sizes order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tensor.stride(a) > tensor.stride(b);
  });
  return order;
}

at::Tensor narrow_to(const at::Tensor& elements, const Box& whole,
                     const Box& part) {
  at::Tensor narrowed = elements;
  for (size_t d = 0; d < part.sizes.size(); ++d) {
    if (part.sizes[d] == whole.sizes[d]) continue;
    narrowed =
        narrowed.narrow(static_cast<int64_t>(d),
                        part.offsets[d] - whole.offsets[d], part.sizes[d]);
  }
  return narrowed;
}

std::vector<HeldBox> held_boxes(const TensorShard& shard) {
  const at::Tensor tensor = shard.tensor.detach();
  if (std::holds_alternative<Replicate>(shard.placement)) {
    require_fit(tensor.sizes() == at::IntArrayRef(shard.shape), shard);
    return {{whole_box(shard.shape), tensor}};
  }
  if (const auto* part = std::get_if<Shard>(&shard.placement)) {
    require_fit(part->box.sizes.size() == shard.shape.size() &&
                    tensor.sizes() == at::IntArrayRef(part->box.sizes),
                shard);
    return {{part->box, tensor}};
  }
  const auto& [range, order, part] = std::get<FlatShard>(shard.placement);
  const Box whole = part.value_or(whole_box(shard.shape));
  require_fit(order.size() == shard.shape.size() &&
                  whole.sizes.size() == order.size() &&
                  tensor.is_contiguous() && tensor.numel() == range.size() &&
                  range.begin >= 0 && range.end <= whole.numel(),
              shard);
  const Sizes back = inverse(order);
  const at::Tensor elements = tensor.view({-1});
  std::vector<HeldBox> boxes;
  int64_t begin = 0;
  for (const Box& box : boxes_of_range(permuted(whole.sizes, order), range)) {
    const int64_t count = box.numel();
    Box held{permuted(box.offsets, back), permuted(box.sizes, back)};
    for (size_t d = 0; d < held.offsets.size(); ++d) {
      held.offsets[d] += whole.offsets[d];
    }
    boxes.push_back(
        {std::move(held),
         elements.narrow(0, begin, count).view(box.sizes).permute(back)});
    begin += count;
  }
  return boxes;
}

}  // namespace lockstep::internal
