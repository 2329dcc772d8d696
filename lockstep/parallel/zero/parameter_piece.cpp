#include "lockstep/parallel/zero/parameter_piece.h"

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>

#include <stdexcept>
#include <utility>

namespace lockstep::internal {

// These call the implementation of as_strided(): the dispatcher would take more
// time than it. Below autograd and its tracking of views, an alias is a plain
// tensor.
at::Tensor memory_slice(const at::Tensor& tensor, Range range) {
  return at::native::as_strided_tensorimpl(
      tensor, {range.size()}, {1}, tensor.storage_offset() + range.begin);
}

at::Tensor memory_alias(const at::Tensor& tensor) {
  return at::native::as_strided_tensorimpl(
      tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

void require_dense_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() || gradient.layout() == c10::kStrided) return;
  throw std::invalid_argument(
      "ZeroRedundancyOptimizer: a parameter has a sparse gradient, which "
      "cannot be divided; make the embedding dense (sparse(false)), or leave "
      "its parameters out of the groups and give them to an optimizer of their "
      "own");
}

ParameterPiece::ParameterPiece(at::Tensor parameter, Range range, bool shaped)
    : parameter_(std::move(parameter)),
      range_(range),
      shaped_(shaped || !parameter_.is_non_overlapping_and_dense()),
      piece_(part_of(parameter_)) {}

at::Tensor ParameterPiece::part_of(const at::Tensor& whole) const {
  return shaped_ ? memory_alias(whole) : memory_slice(whole, range_);
}

void ParameterPiece::refresh() {
  const auto offset =
      static_cast<size_t>(range_.begin) * parameter_.element_size();
  if (piece_.const_data_ptr() ==
      static_cast<const char*>(parameter_.const_data_ptr()) + offset) {
    return;
  }
  piece_.set_data(part_of(parameter_));
}

const at::Tensor& ParameterPiece::gradient() {
  require_dense_gradient(parameter_);
  at::Tensor whole = parameter_.grad();
  if (!whole.defined()) return gradient_ = at::Tensor();
  if (!shaped_ && whole.strides() != parameter_.strides()) {
    const at::NoGradGuard no_grad;
    whole = at::empty_like(parameter_.detach(), whole.options()).copy_(whole);
    parameter_.mutable_grad() = whole;
  }
  const auto offset = static_cast<size_t>(range_.begin) * whole.element_size();
  if (!gradient_.defined() || !gradient_.is_alias_of(whole) || shaped_ ||
      gradient_.const_data_ptr() !=
          static_cast<const char*>(whole.const_data_ptr()) + offset) {
    gradient_ = part_of(whole);
  }
  return gradient_;
}

void ParameterPiece::take_gradient() { piece_.mutable_grad() = gradient(); }

void ParameterPiece::drop_gradient() {
  piece_.mutable_grad() = at::Tensor();
  gradient_ = at::Tensor();
}

}  // namespace lockstep::internal
