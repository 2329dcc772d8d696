#include "lockstep/parallel/comm_hooks/orthogonalize.h"

#include <ATen/ATen.h>

namespace lockstep::internal {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    auto column = matrices.narrow(2, i, 1);
    auto norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1},
                                       /*keepdim=*/true);
    if (epsilon == 0) {
      norm.masked_fill_(norm.eq(0), 1);
    } else {
      norm.add_(epsilon);
    }
    column.div_(norm);
    if (i + 1 == columns) break;
    auto rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(1, /*keepdim=*/true) * column);
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= 2 || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

}  // namespace lockstep::internal
