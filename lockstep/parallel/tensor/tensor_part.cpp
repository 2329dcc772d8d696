#include "lockstep/parallel/tensor/tensor_part.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/comm/placement.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {

ProcessGroupPtr tensor_group(const ProcessGroupPtr& given) {
  const ProcessGroupPtr group = group_if_any(given);
  return group && group->size() > 1 ? group : nullptr;
}

Range tensor_part(int64_t size, const ProcessGroupPtr& group) {
  if (!group) return {.begin = 0, .end = size};
  const Box box = chunk_box({size}, 0, group->rank(), group->size());
  return {.begin = box.offsets[0], .end = box.offsets[0] + box.sizes[0]};
}

at::Tensor part_of_parameter(const at::Tensor& whole, int64_t dim,
                             const ProcessGroupPtr& group) {
  if (!whole.defined() || !group) return whole_parameter(whole);
  at::NoGradGuard no_grad;
  const Range range = tensor_part(whole.size(dim), group);
  // A clone of a narrowed tensor could keep its strides.
  auto part = whole.detach()
                  .narrow(dim, range.begin, range.size())
                  .clone(at::MemoryFormat::Contiguous);
  part.set_requires_grad(whole.requires_grad());
  set_placement(part, lockstep::Shard{.dim = dim, .size = whole.size(dim)},
                group);
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
