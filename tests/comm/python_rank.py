"""A rank in Python, among ranks in C++ (python_rank_test.cpp).

Usage: python_rank.py collectives|groups BACKEND

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the environment's. Does the
same as the C++ ranks, operation by operation, and fails on a wrong result.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def expect(have, want):
    if not torch.equal(have, want):
        raise AssertionError(f"rank {dist.get_rank()} has {have}, not {want}")


def collectives(rank, size):
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


def expect_sum_of_ranks(group, ranks):
    rank = dist.get_rank()
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if member != (rank in ranks):
        raise AssertionError(f"rank {rank}: {group} is a group of {ranks}")
    if not member:
        return
    total = torch.full((3,), rank, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    expect(total, torch.full((3,), sum(ranks)))


def groups(rank, size):
    everyone = list(range(size))

    def make(ranks):
        expect_sum_of_ranks(dist.new_group(ranks), ranks)

    make(everyone)
    make([0, size - 1])
    make([size - 1])
    make([0])
    make(everyone[1:])
    make(everyone[:-1])
    expect_sum_of_ranks(
        dist.new_group(timeout=timedelta(seconds=35), backend=sys.argv[2],
                       group_desc="a name of Python's own"), everyone)
    expect_sum_of_ranks(dist.new_subgroups(size)[0], everyone)
    if size == 4:
        expect_sum_of_ranks(dist.new_subgroups(2)[0],
                            [0, 1] if rank < 2 else [2, 3])
        sets = [[0, 3], [1, 2]]
        expect_sum_of_ranks(dist.new_subgroups_by_enumeration(sets)[0],
                            sets[0] if rank in sets[0] else sets[1])
    make(everyone)


# Uses a device map: plain "gloo" makes a group for each device type.
dist.init_process_group(sys.argv[2], timeout=timedelta(seconds=30))
{"collectives": collectives, "groups": groups}[sys.argv[1]](
    dist.get_rank(), dist.get_world_size())
dist.barrier()
dist.destroy_process_group()
# Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
# ("terminate called without an active exception") after all is done.
os._exit(0)
