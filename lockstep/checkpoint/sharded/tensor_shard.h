#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/state/box.h"

namespace lockstep::internal {

// How a tensor is laid out over the ranks. The first two are those of c10d's
// torch/csrc/distributed/Placement.h; whatever divides tensors in another way
// gives the box that this rank has.

// Every rank that lists the tensor has all of it, with equal values. One of
// them writes it, or each a part of it.
struct Replicate {};

// This rank has the elements in `box`: chunk_box() for c10d's Shard(dim). Ranks
// with the same box have equal values; one of them writes it.
struct Shard {
  Box box;
};

// This rank has the elements `range` of a box of the tensor (none means the
// whole tensor), counted in row-major order of the box after permuting its
// dimensions by `order`: position d of the permuted box is dimension order[d].
// For the pieces of ZeroRedundancyOptimizer, which are ranges of a parameter's
// memory, and for layouts that have a range (tensor_layout.h).
struct FlatShard {
  Range range;
  Sizes order;
  std::optional<Box> box{};
};

using Placement = std::variant<Replicate, Shard, FlatShard>;

// The part of a named tensor that this rank has: to be saved, or to be loaded
// into.
struct TensorShard {
  // As in the files; the same on all ranks.
  std::string name;
  // The shape of the whole tensor.
  Sizes shape;
  Placement placement;
  // The part. Its shape is `shape` if it is replicated, and the sizes of the
  // box if it is a Shard. A FlatShard has any shape and is contiguous. On any
  // device.
  at::Tensor tensor;
  // Whether ranks may have different values, of which those of the first rank
  // that lists the tensor are saved. For buffers, and for the state of an
  // optimizer that steps on each rank by itself.
  bool of_first_rank{false};
  // Whether the ranks that have the shard only repeat what others have under
  // the same name, and perhaps divide in another way: a weight that two stages
  // of a pipeline use (tensor_layout.h). If others have it, they write it.
  bool duplicate{false};
};

// A box of a tensor, and the elements in it as a view of a TensorShard's
// tensor, whose dimensions are those of the box.
struct HeldBox {
  Box box;
  at::Tensor elements;
};

// Returns the part that this rank has as boxes. A FlatShard has several; they
// ascend in the order of its elements. Throws std::invalid_argument if tensor,
// shape and placement do not fit together.
std::vector<HeldBox> held_boxes(const TensorShard& shard);

// Returns "replicate", "shard" or "flat", for the manifest.
std::string text_of(const Placement& placement);

// Returns the order of dimensions by which `tensor` must be permuted to be
// contiguous. `tensor` must be dense.
Sizes memory_order(const at::Tensor& tensor);

// Returns the box `part` of the box `whole`, which `elements` has.
at::Tensor narrow_to(const at::Tensor& elements, const Box& whole,
                     const Box& part);

// The names of tensors in a folder are those of PyTorch's distributed
// checkpoint for the state dict
//
//   {"model": model.state_dict(),
//    "optimizer": get_optimizer_state_dict(model, optimizer)}
//
// (torch.distributed.checkpoint.state_dict): each is the keys on its way,
// joined by dots.
inline constexpr const char* kModelPrefix = "model.";
// Before the parameter's name, a dot, and the name of the value.
inline constexpr const char* kStatePrefix = "optimizer.state.";
inline constexpr const char* kOptionPrefix = "optimizer.param_groups.";
inline constexpr const char* kOptimizerPrefix = "optimizer.";
// After the name of an item that is an optimizer, and a dot.
inline constexpr const char* kItemStateInfix = "state.";
// Before the number of a rank; Lockstep's own.
inline constexpr const char* kGeneratorPrefix = "lockstep.generator.";

}  // namespace lockstep::internal
