#pragma once

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// After torch.distributed.algorithms.ddp_comm_hooks.default_hooks and
// debugging_hooks (PyTorch documentation, "DDP Communication Hooks").
//
// What Python registers as register_comm_hook(state, name_of_hook) is here
// register_comm_hook(name_of_hook(state)): a function of Python's name takes
// the state and returns the hook. A group of none is the default group, which
// must be there when the hook is made; it must hold the ranks of the
// DistributedDataParallel.
//
// A hook belongs to one DistributedDataParallel and is called by one thread at
// a time. It throws what the collectives do.
namespace lockstep {

// Divides and sums, as DistributedDataParallel does without a hook.
// On the wire: the gradients.
CommHook allreduce_hook(ProcessGroupPtr group = {});

// Gradients travel, and are summed, as half types: rounded, then divided by
// the group's size, then summed. float16 loses what is smaller than 6e-8 and
// overflows beyond 65,504; bfloat16 has float's range and 8 bits of precision.
// On the wire: half of float32.
CommHook fp16_compress_hook(ProcessGroupPtr group = {});
CommHook bf16_compress_hook(ProcessGroupPtr group = {});

// `hook` sees the bucket as float16 or bfloat16; what it makes of it is
// converted back. fp16_compress_wrapper(powerSGD_hook(state)), say.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

// Every rank keeps its own gradients, undivided: to see what communication
// costs. Replicas go different ways.
CommHook noop_hook();

}  // namespace lockstep
