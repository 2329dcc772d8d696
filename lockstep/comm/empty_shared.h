#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// An uninitialised, contiguous tensor in memory that the ranks of `group`
// (none: the default group) read and write directly, so that collectives need
// not copy it in and out. Worth it for what is reduced again and again, from
// about 100 KiB on. Every operation takes it as any other tensor, and so do the
// collectives of other groups; views of it count too.
//
// Where the group's backend for options.device() has no such memory, or there
// is no room for it, the tensor lies in ordinary memory: the results are the
// same bit by bit, only later. is_shared() tells.
//
// No collective: ranks may call it when and as often as they like, and a
// reduction in which only some ranks give such tensors is right. The memory
// is reserved at once. It is given back when the last tensor that uses it is
// gone, which may be after the group, and every other rank has made one more
// call in the group. Any thread; does not block on other ranks.
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
