#include "lockstep/comm/empty_shared.h"

#include <ATen/ATen.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/accumulate.h>

#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"

namespace lockstep {

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options,
                        const ProcessGroupPtr& group) {
  auto& backend = internal::inside(internal::group_or_default(group))
                      .backend(options.device().type());
  const bool requires_grad = options.requires_grad();
  const auto plain = options.requires_grad(false);
  const auto count = c10::multiply_integers(sizes);
  at::Tensor tensor;
  if (count > 0 && backend.supportsTensorAlloc(options.device().index())) {
    try {
      // Sets the sizes in place, because autograd would track a view.
      tensor = backend.allocateTensor(count, plain);
      tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    } catch (const c10::DistError&) {
      tensor.reset();  // no room
    }
  }
  if (!tensor.defined()) tensor = at::empty(sizes, plain);
  return tensor.requires_grad_(requires_grad);
}

bool is_shared(const at::Tensor& tensor, const ProcessGroupPtr& group) {
  if (!tensor.has_storage() || tensor.numel() == 0) return false;
  const auto of = internal::group_or_default(group);
  const auto* sharing = dynamic_cast<const internal::HostSharing*>(
      &internal::inside(of).backend(tensor.device().type()));
  return sharing != nullptr &&
         sharing->shares(
             tensor.const_data_ptr(),
             at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                              tensor.itemsize()));
}

}  // namespace lockstep
