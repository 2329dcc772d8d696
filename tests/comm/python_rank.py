"""A rank in Python, among ranks in C++ (python_rank_test.cpp).

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the environment's. Does the
same as the C++ ranks, operation by operation, and fails on a wrong result.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def expect(have, want):
    if not torch.equal(have, want):
        raise AssertionError(f"rank {dist.get_rank()} has {have}, not {want}")


# As a device map: plain "gloo" makes a group for each device type.
dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()

total = torch.arange(5, dtype=torch.float64) + rank
dist.all_reduce(total)
expect(total, size * torch.arange(5, dtype=torch.float64)
       + size * (size - 1) / 2)

for source in range(size):
    value = torch.full((3,), rank, dtype=torch.int64)
    dist.broadcast(value, source)
    expect(value, torch.full((3,), source))

parts = [torch.empty(2) for _ in range(size)]
dist.all_gather(parts, torch.full((2,), float(rank)))
for source, part in enumerate(parts):
    expect(part, torch.full((2,), float(source)))

dist.barrier()
dist.destroy_process_group()
# Not by the interpreter's own end: with torch 2.13 that aborts now and then
# ("terminate called without an active exception"), when all is done.
os._exit(0)
