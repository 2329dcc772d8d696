#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Returns an uninitialised, contiguous tensor in memory that the ranks of
// `group` (none means the default group) read and write directly, so that
// collectives need not copy it in and out. That pays for tensors that are
// reduced again and again, from about 100 KiB on. Every operation takes it like
// any other tensor, and so do the collectives of other groups; views of it are
// as good.
//
// If the group's backend for options.device() has no such memory, or no room is
// left in it, the tensor lies in ordinary memory: the results are the same bit
// by bit, but come later. is_shared() tells which it is.
//
// Not a collective: ranks may call it when and as often as they like, and a
// reduction is right even if only some ranks give such tensors. The memory is
// reserved at once. It is given back when the last tensor that uses it is gone,
// which may be after the group is, and every other rank has made one more call
// in the group. Any thread may call; does not block on other ranks.
//
// Throws std::invalid_argument if the group has no backend for the device or
// was destroyed.
at::Tensor empty_shared(at::IntArrayRef sizes,
                        const at::TensorOptions& options = {},
                        const ProcessGroupPtr& group = nullptr);

// Whether all of `tensor` lies in memory that empty_shared() took for `group`.
bool is_shared(const at::Tensor& tensor,
               const ProcessGroupPtr& group = nullptr);

}  // namespace lockstep
