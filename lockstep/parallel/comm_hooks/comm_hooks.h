#pragma once

#include <cstdint>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/comm_hooks/comm_bytes.h"
#include "lockstep/parallel/comm_hooks/post_local_sgd_hook.h"
#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// Every communication hook. ddp/comm_hook.h says what a hook is.
namespace lockstep {

// The hooks of torch.distributed.algorithms.ddp_comm_hooks.default_hooks and
// debugging_hooks (PyTorch documentation, "DDP Communication Hooks").
//
// Python's register_comm_hook(state, name_of_hook) is here
// register_comm_hook(name_of_hook(state)): a function with the name of Python's
// hook takes the state and returns the hook. A null group means the default
// group, which must exist when the hook is made. The group must hold the ranks
// of the DistributedDataParallel.
//
// A hook belongs to one DistributedDataParallel, and one thread at a time calls
// it. It throws what the collectives throw. Hooks and wrappers that compress
// throw std::invalid_argument, on every rank, for complex gradients.

// Divides and sums, as DistributedDataParallel does without a hook.
// On the wire: the gradients.
CommHook allreduce_hook(ProcessGroupPtr group = {});

// Gradients travel, and are summed, in a 16-bit dtype: they are rounded, then
// divided by the group's size, then summed. float16 loses values below 6e-8 and
// overflows above 65,504; bfloat16 has float's range and 8 bits of precision.
// On the wire: half of float32.
CommHook fp16_compress_hook(ProcessGroupPtr group = {});
CommHook bf16_compress_hook(ProcessGroupPtr group = {});

// `hook` sees the bucket as float16 or bfloat16; its result is converted back.
// Example: fp16_compress_wrapper(power_sgd_hook(state)).
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

// Every rank keeps its own gradients, undivided; replicas drift apart. Use it
// to measure what communication costs.
CommHook noop_hook();

// The hooks of torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks.
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

// One scale for each bucket.
CommHook quantization_pertensor_hook(ProcessGroupPtr group = {});

// One scale for each `bucket_size` elements (Python's name for the size of a
// channel). Throws std::invalid_argument unless it is positive.
CommHook quantization_perchannel_hook(ProcessGroupPtr group = {},
                                      int64_t bucket_size = 512);

}  // namespace lockstep
