#include "lockstep/data/select_rows.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

namespace lockstep::internal {

at::Tensor select_rows(const at::Tensor& tensor,
                       c10::ArrayRef<size_t> indices) {
  static_assert(sizeof(size_t) == sizeof(int64_t));
  // The indices are read in place: index_select wants int64, and size_t differs
  // from it only in values that no dataset reaches (they would become negative,
  // and index_select refuses them).
  const at::Tensor rows = at::from_blob(const_cast<size_t*>(indices.data()),
                                        {static_cast<int64_t>(indices.size())},
                                        at::TensorOptions(at::kLong));
  // to() is a no-op on the CPU. The copy to a GPU from pageable memory is
  // synchronous, so the caller's indices need not outlive this call there
  // either.
  return tensor.index_select(0, rows.to(tensor.device()));
}

}  // namespace lockstep::internal
