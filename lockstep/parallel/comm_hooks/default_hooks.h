#pragma once

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

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
namespace lockstep {

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

}  // namespace lockstep
