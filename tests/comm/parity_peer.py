"""Every collective in Python, for python_parity_test.cpp to compare with.

    parity_peer.py OUTPUT

A rank of a Gloo world by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Runs
each operation over each dtype that Python's Gloo takes, on numbers made by the
formula of number() (python_parity_test.cpp has the same), and writes
{"all_reduce/SUM/float32": "bytes in hexadecimal", ...} to OUTPUT.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

SIZE = 60  # elements of a tensor; 20 rows of 3

REALS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int8", "uint8", "int32", "int64"]
COMPLEX = ["complex64", "complex128"]
REDUCED = {
    "SUM": REALS + INTEGERS + COMPLEX,
    "AVG": REALS + COMPLEX,
    "PRODUCT": REALS + INTEGERS + ["bool"],
    "MIN": REALS + INTEGERS + ["bool"],
    "MAX": REALS + INTEGERS + ["bool"],
    "BAND": INTEGERS + ["bool"],
    "BOR": INTEGERS + ["bool"],
    "BXOR": INTEGERS + ["bool"],
}
MOVED = REALS + INTEGERS + COMPLEX + ["bool"]


def bits(seed, index):
    h = ((seed + 1) * 2654435761 + (index + 1) * 3266489917) & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 2246822519 & 0xFFFFFFFF
    return h ^ (h >> 13)


def number(dtype, seed, index):
    """32 hashed bits as a number of `dtype`."""
    h = bits(seed, index)
    if dtype == "bool":
        return bool(h & 1)
    if dtype == "uint8":
        return h & 0xFF
    if dtype == "int8":
        return (h & 0xFF) - 128
    if dtype in ("int32", "int64"):
        return h - (1 << 31)
    real = h / (1 << 31) - 1
    if dtype in COMPLEX:
        return complex(real, bits(seed + 5000, index) / (1 << 31) - 1)
    return real


def values(dtype, seed, count=SIZE):
    """Rank `seed % 100`'s tensor for part `seed / 100`."""
    wide = {"float16": "float64", "bfloat16": "float64"}.get(dtype, dtype)
    numbers = [number(dtype, seed, i) for i in range(count)]
    return torch.tensor(numbers, dtype=getattr(torch, wide)).to(
        getattr(torch, dtype))


def reductions(rank, world, write):
    for name, dtypes in REDUCED.items():
        op = getattr(dist.ReduceOp, name)
        for dtype in dtypes:
            key = f"{name}/{dtype}"
            tensor = values(dtype, rank)
            dist.all_reduce(tensor, op)
            write(f"all_reduce/{key}", tensor)

            tensor = values(dtype, rank)
            dist.reduce(tensor, world - 1, op)
            if rank == world - 1:
                write(f"reduce/{key}", tensor)

            parts = [values(dtype, rank + 100 * i) for i in range(world)]
            output = torch.empty_like(parts[0])
            dist.reduce_scatter(output, parts, op)
            write(f"reduce_scatter/{key}", output)

            output = torch.empty_like(parts[0])
            dist.reduce_scatter_tensor(output, torch.cat(parts), op)
            write(f"reduce_scatter_tensor/{key}", output)

            parts = [values(dtype, rank + 100 * i, 10 + i) for i in range(3)]
            dist.all_reduce_coalesced(parts, op)
            write(f"all_reduce_coalesced/{key}", torch.cat(parts))


def sparse(rank, world, write):
    for dtype in ("float32", "float64"):
        count = rank + 2
        places = torch.tensor([[i * (rank + 1) % 10 for i in range(count)]])
        tensor = torch.sparse_coo_tensor(places, values(dtype, rank, count),
                                         (10,))
        dist.all_reduce(tensor)
        write(f"sparse/{dtype}", tensor.to_dense())


def rows(source, target):
    return (source + 2 * target) % 4


def data_movement(rank, world, write):
    for dtype in MOVED:
        own = values(dtype, rank)

        def empty(count=1):
            return [torch.empty_like(own) for _ in range(count)]

        tensor = own.clone()
        dist.broadcast(tensor, 1)
        write(f"broadcast/{dtype}", tensor)

        outputs = empty(world)
        dist.all_gather(outputs, own)
        write(f"all_gather/{dtype}", torch.cat(outputs))

        output = torch.cat(empty(world))
        dist.all_gather_into_tensor(output, own)
        write(f"all_gather_into_tensor/{dtype}", output)

        parts = [values(dtype, rank + 100 * i) for i in range(world)]
        if dtype not in COMPLEX:  # "Invalid scalar type"
            outputs = empty(world) if rank == 0 else None
            dist.gather(own, outputs, 0)
            if rank == 0:
                write(f"gather/{dtype}", torch.cat(outputs))

            output, = empty()
            dist.scatter(output, parts if rank == 1 else None, 1)
            write(f"scatter/{dtype}", output)

        outputs = empty(world)
        dist.all_to_all(outputs, parts)
        write(f"all_to_all/{dtype}", torch.cat(outputs))

        sends = [rows(rank, i) for i in range(world)]
        receives = [rows(i, rank) for i in range(world)]
        source = torch.cat([values(dtype, rank + 100 * i, 3 * n).view(n, 3)
                            for i, n in enumerate(sends)])
        output = torch.empty(sum(receives), 3, dtype=own.dtype)
        dist.all_to_all_single(output, source, receives, sends)
        write(f"all_to_all_single/{dtype}", output)

        right, left = (rank + 1) % world, (rank - 1) % world
        output, = empty()
        for work in [dist.isend(own, right), dist.irecv(output, left)]:
            work.wait()
        write(f"isend_irecv/{dtype}", output)

        output, = empty()
        for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, own, left),
                 dist.P2POp(dist.irecv, output, right)]):
            work.wait()
        write(f"batch_isend_irecv/{dtype}", output)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
    results = {}

    def write(name, tensor):
        data = tensor.contiguous().view(-1).view(torch.uint8)
        results[name] = bytes(data.tolist()).hex()

    for part in (reductions, sparse, data_movement):
        part(dist.get_rank(), dist.get_world_size(), write)
    dist.barrier()
    dist.destroy_process_group()
    with open(sys.argv[1], "w") as output:
        json.dump(results, output)
    # Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
    # ("terminate called without an active exception") after all is done.
    sys.stdout.flush()
    os._exit(0)


main()
