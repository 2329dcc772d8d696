#pragma once

#include <cstdint>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// After torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks; the
// form of hooks as in default_hooks.h.
//
// A rank's gradients x travel as bytes y = clamp(round(x / scale) + zero, 0,
// 255) with scale = (max - min) / 255 of the values and 0, at least
// 1.2e-7, and zero = -round(min / scale); each rank sums scale * (y - zero) of
// all ranks in their order and divides by their number. All in float32,
// whatever the dtype of the gradients. What a rank adds is wrong by half a
// scale at most. NaN or Inf in a bucket (or channel) makes all of it NaN.
//
// On the wire: one byte an element to each rank, so that beyond a few ranks it
// is more than an all-reduce of the gradients. Memory: one byte an element and
// rank, and the gradients once.
//
// Python sends the scales in a collective of their own; here they travel in
// front of the bytes.
namespace lockstep {

// One scale a bucket.
CommHook quantization_pertensor_hook(ProcessGroupPtr group = {});

// One scale for each `bucket_size` elements, the name in Python for a channel.
// Throws std::invalid_argument unless it is positive.
CommHook quantization_perchannel_hook(ProcessGroupPtr group = {},
                                      int64_t bucket_size = 512);

}  // namespace lockstep
