#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {

// The elements of one parameter that each rank owns, in memory order: rank r
// owns the range ranges[r], which may be empty. The ranges ascend, and together
// hold every element once.
using Ranges = std::vector<Range>;

// Decides which rank steps which elements. It follows Rajbhandari et al.,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC
// 2020), section 5.1. The result depends only on the arguments and their order,
// so ranks agree without communication; it does not depend on how gradients are
// bucketed.
class Partition {
 public:
  // Parameters are cut at multiples of this number, so that a vectorised kernel
  // does with a piece exactly what it does with the whole, and no two ranks
  // write to one cache line.
  static constexpr int64_t kGrain = 64;
  // Parameters with fewer elements per rank are not cut.
  static constexpr int64_t kSmall = 4096;

  // `cut`: whether parameters may be divided; they may if the optimizer treats
  // each element by itself.
  Partition(int world_size, bool cut);

  // Returns the ranges for each of `parameters`. If parameters are cut: as many
  // contiguous pieces as there are ranks, of equal size except the last, which
  // may have up to kGrain elements per rank more. Parameters that are small or
  // not dense, or all if they are not cut, go as a whole to the rank with the
  // fewest bytes so far, large parameters first.
  std::vector<Ranges> add(const std::vector<at::Tensor>& parameters);

 private:
  Ranges whole(int64_t numel, int64_t bytes);

  bool cut_;
  std::vector<int64_t> bytes_;  // by rank
};

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

// A piece and its parameter's number, counted through all groups as in
// OptimizerState.
struct NumberedPiece {
  int64_t parameter;
  const ParameterPiece* piece;
};

// Collective. Collects the state that the ranks have for their pieces in
// `whole` on the group's rank `to`, where `whole` must have the options and no
// state; on other ranks `whole` is unchanged. `mine`: the result of
// state_dict() for the optimizer of `pieces`. `parameters`: all, by number.
//
// Blocks until this rank's part is sent and, on rank `to`, until everything has
// arrived.
void gather_state(OptimizerState& whole, const OptimizerState& mine,
                  const std::vector<NumberedPiece>& pieces,
                  const std::vector<at::Tensor>& parameters, int to,
                  const ProcessGroupPtr& group);

// Does the reverse: returns the state of an optimizer over `pieces`, without
// groups. Its tensors share the memory of those in `whole`, which must have the
// layout of their parameters.
OptimizerState slice_state(const OptimizerState& whole,
                           const std::vector<NumberedPiece>& pieces);

}  // namespace lockstep::internal
