#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/parallel/zero/partition.h"

namespace lockstep::internal {

// Returns the elements `range` of `tensor`, counted in memory order, as a
// tensor of shape [end - begin] that shares its memory; it is not an autograd
// view and does not share the version counter. `tensor` must be dense.
at::Tensor memory_slice(const at::Tensor& tensor, Range range);

// Returns such an alias of the whole tensor, with its sizes and strides.
at::Tensor memory_alias(const at::Tensor& tensor);

// Throws std::invalid_argument if the parameter's .grad is sparse.
void require_dense_gradient(const at::Tensor& parameter);

// A parameter and the part of it that one rank steps.
class ParameterPiece {
 public:
  // `shaped`: the piece is the whole parameter, in its shape, for an optimizer
  // that looks at more than single elements; otherwise the piece has one
  // dimension.
  ParameterPiece(at::Tensor parameter, Range range, bool shaped);

  const at::Tensor& parameter() const { return parameter_; }
  Range range() const { return range_; }
  bool shaped() const { return shaped_; }
  // Returns the tensor that the optimizer steps; it is always the same object.
  const at::Tensor& tensor() const { return piece_; }

  // Returns the part of `whole` that belongs to this piece; `whole` must have
  // the layout of the parameter.
  at::Tensor part_of(const at::Tensor& whole) const;

  // Follows the parameter if its memory has been replaced (Module::to). The
  // order of its elements in memory must be the same.
  void refresh();

  // Returns this piece's part of the parameter's .grad; undefined if there is
  // none. A gradient whose layout differs from its parameter's is first copied
  // into that layout, and the copy becomes the parameter's .grad. Throws
  // std::invalid_argument for a sparse gradient.
  const at::Tensor& gradient();

  // Give tensor() its gradient for a step, and take it away again.
  void take_gradient();
  void drop_gradient();

 private:
  at::Tensor parameter_;
  Range range_;
  bool shaped_;
  at::Tensor piece_;
  at::Tensor gradient_;
};

}  // namespace lockstep::internal
