#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/parallel/zero/partition.h"

namespace lockstep {

// The elements `range` of `tensor`, counted in memory order: [end - begin],
// sharing its memory, and neither a view of autograd's nor of its version.
// `tensor` is dense.
at::Tensor memory_slice(const at::Tensor& tensor, ElementRange range);

// The same of all of it, with its sizes and strides.
at::Tensor memory_alias(const at::Tensor& tensor);

// A parameter and the part of it that one rank steps.
class ParameterPiece {
 public:
  // `shaped`: the piece has its parameter's shape, as an optimizer wants that
  // looks at more than single elements; all of it then. Otherwise one
  // dimension. `keep_gradient`: whether the gradient's memory stays the same
  // from step to step (a bucket), so that the alias is worth keeping.
  ParameterPiece(at::Tensor parameter, ElementRange range, bool shaped,
                 bool keep_gradient);

  const at::Tensor& parameter() const { return parameter_; }
  ElementRange range() const { return range_; }
  bool shaped() const { return shaped_; }
  // What the optimizer steps: the same tensor for good.
  const at::Tensor& tensor() const { return piece_; }

  // `whole`'s part that this piece is; `whole` is laid out as the parameter.
  at::Tensor part_of(const at::Tensor& whole) const;

  // The parameter's memory may have been replaced (Module::to); goes after it.
  void refresh();

  // This piece's part of the parameter's .grad; undefined where it has none. A
  // gradient laid out differently from its parameter is laid out anew first,
  // and the parameter's .grad becomes that one. Throws std::invalid_argument
  // for a sparse one.
  const at::Tensor& gradient();

  // Gives tensor() its gradient for a step, and takes it back.
  void take_gradient();
  void drop_gradient();

 private:
  at::Tensor parameter_;
  ElementRange range_;
  bool shaped_;
  bool keep_gradient_;
  at::Tensor piece_;
  at::Tensor gradient_;
};

}  // namespace lockstep
