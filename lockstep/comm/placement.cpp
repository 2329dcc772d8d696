#include "lockstep/comm/placement.h"

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>

#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep {
namespace {

internal::TensorLayout layout_of_part(const at::Tensor& part,
                                      const Shard& shard,
                                      const ProcessGroupPtr& group) {
  const auto mistake = [](const std::string& text) {
    return std::invalid_argument("set_placement: " + text);
  };
  if (shard.dim < -part.dim() || shard.dim >= part.dim()) {
    throw mistake(c10::str("Shard::dim is ", shard.dim,
                           ", but the tensor has the shape ", part.sizes()));
  }
  const auto dim =
      static_cast<size_t>(c10::maybe_wrap_dim(shard.dim, part.dim()));
  internal::Sizes shape = part.sizes().vec();
  shape[dim] = shard.size.value_or(shape[dim] * group->size());
  internal::Box box =
      internal::chunk_box(shape, dim, group->rank(), group->size());
  if (part.sizes() != at::IntArrayRef(box.sizes)) {
    throw mistake(c10::str("rank ", group->rank(), " of ", group->size(),
                           " has the shape ", part.sizes(), ", but of ",
                           at::IntArrayRef(shape), " divided along dimension ",
                           dim, " its part is ", at::IntArrayRef(box.sizes),
                           "; divide as torch::chunk() does"));
  }
  return {.shape = std::move(shape), .box = std::move(box), .groups = {group}};
}

}  // namespace

void set_placement(const at::Tensor& tensor, const Placement& placement,
                   const ProcessGroupPtr& given) {
  const auto group = internal::group_if_any(given);
  const auto* known = internal::layout_of(tensor);
  if (known != nullptr && (known->range || known->of_stage)) {
    throw std::invalid_argument(
        "set_placement: the tensor is one that FullyShard or a Pipeline has "
        "divided already; call it before");
  }
  if (!group || group->size() == 1 ||
      std::holds_alternative<Replicate>(placement)) {
    internal::drop_layout(tensor);
  } else if (const auto* shard = std::get_if<Shard>(&placement)) {
    internal::set_layout(tensor, layout_of_part(tensor, *shard, group));
  } else {
    const internal::Sizes shape = tensor.sizes().vec();
    internal::set_layout(tensor, {.shape = shape,
                                  .box = internal::whole_box(shape),
                                  .groups = {group},
                                  .own_in = group});
  }
}

}  // namespace lockstep
