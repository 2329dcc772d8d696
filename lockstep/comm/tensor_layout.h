#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/state/box.h"

namespace lockstep::internal {

// Which part of a larger tensor a rank's tensor is, and which ranks have the
// other parts. It belongs to the tensor itself, as in Python's DTensor, so that
// whatever gets a list of parameters (clipping, snapshots, an optimizer) sees
// it: a part of a parameter that is sharded (FSDP, tensor parallel), or a whole
// parameter of one stage of a pipeline.
struct TensorLayout {
  // The shape of the whole tensor.
  Sizes shape{};
  // The part of it that this rank has, or, with `range`, that the ranks of the
  // last group have together.
  Box box{};
  // If set, this rank has only these elements of the box, in row-major order;
  // the tensor is contiguous, and sizes_of_part() says which shape it usually
  // has. Otherwise the tensor has the sizes of the box.
  std::optional<Range> range{};
  // The ranks of each of these groups have different elements; within the
  // product of these groups each element exists once. All other ranks have
  // equal values. From the outermost to the innermost: a pipeline's group comes
  // first, because its stages divide their parameters each in their own way,
  // and the group over which `range` divides the box comes last. Every rank of
  // a group must have a parameter whose layout names it, because norms are
  // added up over the group.
  std::vector<ProcessGroupPtr> groups{};
  // Whether ranks of these groups hold the same elements again, although they
  // are counted there: a sum over all elements (a norm) leaves this tensor out.
  // For a weight that two stages of a pipeline use: in all stages but one.
  bool duplicate{false};
  // Whether the first of `groups` is a pipeline's: the parameter or buffer is
  // one of a stage of this rank, and the other ranks of that group have others,
  // to which snapshots must not give the same name.
  bool of_stage{false};
  // If set, the one of `groups` of which each rank has a tensor of its own
  // (placement.h: Own), to which snapshots must not give the same name, either.
  ProcessGroupPtr own_in{};
  // For a weight that several stages use: text that is equal in all of them,
  // and that no other weight of the pipeline has. Otherwise empty.
  std::string tied{};
};

// Gives `tensor` this layout, in place of one that it may have. The layout
// stays with the tensor object, also if its data is replaced (Module::to(),
// set_data()); views, clones and detach() have none. Throws
// std::invalid_argument if the tensor's shape is not that of the part, or the
// part is not within the whole. Any thread may call.
void set_layout(const at::Tensor& tensor, TensorLayout layout);

// Takes the layout away, if there is one.
void drop_layout(const at::Tensor& tensor);

// Returns the layout of `tensor`; nullptr if it has none, that is, if each rank
// has all of it. The result lives as long as the tensor, or until the next
// set_layout() or drop_layout() for it. Any thread may call.
const TensorLayout* layout_of(const at::Tensor& tensor);

// Returns the shape of this rank's part, which has as many dimensions as the
// whole: [rows, ...] if `range` is whole rows of the box, otherwise
// [1, ..., 1, n]. A part of a tensor without dimensions has one.
Sizes sizes_of_part(const TensorLayout& layout);

// Whether ranks of `group` have different parts of `tensor`. This rank is a
// member.
bool is_divided_over(const at::Tensor& tensor, const ProcessGroup& group);

// Throws std::invalid_argument if so, for code that takes the tensors of all
// ranks for replicas: "CALLER: ranks of the group have different parts of
// 'NAME', ...; REMEDY". Without a name the error has the sizes.
void require_replica(const at::Tensor& tensor, const ProcessGroup& group,
                     const char* caller, const char* remedy,
                     const std::string& name = {});

// Returns the elements of `whole`, a tensor of the layout's shape, that this
// rank has, in the shape of sizes_of_part(): a view if that is possible,
// otherwise a copy.
at::Tensor part_of(const at::Tensor& whole, const TensorLayout& layout);

}  // namespace lockstep::internal
