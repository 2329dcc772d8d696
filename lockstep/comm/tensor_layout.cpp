#include "lockstep/comm/tensor_layout.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <utility>

namespace lockstep::internal {
namespace {

// TensorImpl carries one object of a backend's own, which neither the CPU nor
// CUDA use.
struct AttachedLayout : c10::BackendMeta {
  explicit AttachedLayout(TensorLayout held) : layout(std::move(held)) {}
  TensorLayout layout;
};

void require_fits(const at::Tensor& tensor, const TensorLayout& layout) {
  const Box& box = layout.box;
  if (intersection(box, whole_box(layout.shape)) != box && box.numel() > 0) {
    throw std::invalid_argument(c10::str(
        "a layout has the part ", text_of(box), " of a tensor of shape ",
        at::IntArrayRef(layout.shape), ", which does not contain it"));
  }
  const Sizes shape =
      layout.range ? Sizes{layout.range->size()} : layout.box.sizes;
  if (tensor.sizes() != at::IntArrayRef(shape)) {
    throw std::invalid_argument(
        c10::str("a layout is for a tensor of shape ", at::IntArrayRef(shape),
                 ", but the tensor has the shape ", tensor.sizes()));
  }
  if (layout.range &&
      (layout.range->begin < 0 || layout.range->end > box.numel())) {
    throw std::invalid_argument(
        c10::str("a layout has the elements ", layout.range->begin, " to ",
                 layout.range->end, " of a part with ", box.numel()));
  }
}

}  // namespace

void set_layout(const at::Tensor& tensor, TensorLayout layout) {
  require_fits(tensor, layout);
  tensor.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<AttachedLayout>(std::move(layout)));
}

const TensorLayout* layout_of(const at::Tensor& tensor) {
  auto* attached = dynamic_cast<AttachedLayout*>(
      tensor.unsafeGetTensorImpl()->get_backend_meta());
  return attached == nullptr ? nullptr : &attached->layout;
}

}  // namespace lockstep::internal
