#include "lockstep/parallel/tensor/tensor_part.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {

ProcessGroupPtr tensor_group(const ProcessGroupPtr& given) {
  ProcessGroupPtr group = given;
  if (!group && is_initialized()) group = default_group();
  return group && group->size() > 1 ? group : nullptr;
}

Range tensor_part(int64_t size, const ProcessGroupPtr& group) {
  if (!group) return {.begin = 0, .end = size};
  const int64_t ranks = group->size();
  const int64_t each = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(group->rank() * each, size);
  return {.begin = begin, .end = std::min(begin + each, size)};
}

at::Tensor part_of_parameter(const at::Tensor& whole, int64_t dim,
                             const ProcessGroupPtr& group) {
  if (!whole.defined() || !group) return whole_parameter(whole);
  at::NoGradGuard no_grad;
  const int64_t size = whole.size(dim);
  const Range range = tensor_part(size, group);
  // A clone of a narrowed tensor could keep its strides.
  auto part = whole.detach()
                  .narrow(dim, range.begin, range.size())
                  .clone(at::MemoryFormat::Contiguous);
  part.set_requires_grad(whole.requires_grad());
  Sizes shape = part.sizes().vec();
  Box box{.offsets = Sizes(shape.size(), 0), .sizes = shape};
  const auto index = static_cast<size_t>(dim);
  shape[index] = size;
  box.offsets[index] = range.begin;
  set_layout(
      part,
      {.shape = std::move(shape), .box = std::move(box), .groups = {group}});
  return part;
}

at::Tensor whole_parameter(const at::Tensor& whole) {
  if (!whole.defined()) return whole;
  at::NoGradGuard no_grad;
  auto copy = whole.detach().clone();
  copy.set_requires_grad(whole.requires_grad());
  return copy;
}

}  // namespace lockstep::internal
