#pragma once

#include <cstdint>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// The hooks of torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks.
// They are registered like the hooks of default_hooks.h.
//
// A rank's gradients x travel as bytes y = clamp(round(x / scale) + zero, 0,
// 255). Here min and max are those of the values and 0, scale = (max - min) /
// 255, at least 1.2e-7, and zero = -round(min / scale). Each rank adds up scale
// * (y - zero) for all ranks in their order and divides by their number. All of
// this is in float32, whatever the dtype of the gradients. The error of each
// rank's contribution is at most half a scale. NaN or Inf in a bucket (or
// channel) makes all of it NaN.
//
// On the wire: one byte for each element to each rank, so with more than a few
// ranks this is more than an all-reduce of the gradients. Memory: one byte for
// each element and rank, and one copy of the gradients.
//
// Python sends the scales in a collective of their own; here they travel in the
// same message as the bytes.
namespace lockstep {

// One scale for each bucket.
CommHook quantization_pertensor_hook(ProcessGroupPtr group = {});

// One scale for each `bucket_size` elements (Python's name for the size of a
// channel). Throws std::invalid_argument unless it is positive.
CommHook quantization_perchannel_hook(ProcessGroupPtr group = {},
                                      int64_t bucket_size = 512);

}  // namespace lockstep
