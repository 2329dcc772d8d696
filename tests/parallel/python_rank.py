"""One rank of a data-parallel training, in Python (ddp_python_rank_test.cpp).

    python_rank.py --init-method file:///... --rank R --world-size N \\
        --output FOLDER [--backend BACKEND] MODEL:BUCKET_CAP_MB:ACCUMULATE:OPTION ...

Trains each MODEL by DistributedDataParallel in a group whose other ranks may be
C++; BUCKET_CAP_MB "default" leaves it to DDP, OPTION is one of OPTIONS. Begins
at a model, and takes batches, that are the same numbers in both languages; see
fill() and batch(). Writes, for each:

  FOLDER/MODEL:...:R.state   the parameters, then the buffers, as float64,
                             little endian, one behind the other
  FOLDER/MODEL:...:R.ops     the operations that the group was given: a line
                             each, as "broadcast [22] int64"

With --mismatch it constructs models that the others refuse, instead.
"""

import argparse
import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = {
    "none": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "skip_static": {"static_graph": True,
                    "skip_all_reduce_unused_params": True},
    "skip_found": {"find_unused_parameters": True,
                   "skip_all_reduce_unused_params": True},
    "views": {"gradient_as_bucket_view": True},
    "no_views": {"gradient_as_bucket_view": False},
    "local_buffers": {"broadcast_buffers": False},
    "buffers_once": {"forward_sync_buffers": False},
    "no_init_sync": {"init_sync": False},
    "batched_grad_copy": {"batched_grad_copy": True},  # Python's only
}
STEPS = 20
ROWS = 4
INPUTS = 6


def ramp(size, start):
    """Numbers in [-1, 1] that float32 holds the same way everywhere."""
    numbers = (torch.arange(size, dtype=torch.int64) * 37 + start) % 1009
    return (numbers - 504).to(torch.float32) / 504


def batch(rank, number):
    start = 104729 * rank + 7919 * number
    return (ramp(ROWS * INPUTS, start).view(ROWS, INPUTS),
            ramp(ROWS, start + 1).view(ROWS, 1))


class Spare(nn.Module):
    """Has a parameter that no rank uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(100))

    def forward(self, x):
        return x


def make_net(kind, rank):
    if kind == "mlp":
        net = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(),
                            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    elif kind == "spare":
        net = nn.Sequential(nn.Linear(INPUTS, 16), Spare(), nn.Tanh(),
                            nn.Linear(16, 1))
    else:
        net = nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16),
                            nn.Tanh(), nn.Linear(16, 8), nn.BatchNorm1d(8),
                            nn.Tanh(), nn.Linear(8, 1))
    # Each rank has other numbers: the wrapper must replace them by rank 0's.
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(ramp(parameter.numel(), 100 * number + rank)
                            .view_as(parameter) / 2)
        for buffer in net.buffers():
            buffer.add_(rank)
    return net


def train(kind, cap, accumulate, option, rank):
    options = OPTIONS[option]
    # Without init_sync all ranks must begin alike.
    net = make_net(kind, rank if options.get("init_sync", True) else 0)
    model = DistributedDataParallel(net, bucket_cap_mb=cap, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x, y = batch(rank, step * accumulate + micro)
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / accumulate
                loss.backward()
        optimizer.step()
    return net


class RecordedOperations(TorchDispatchMode):
    """Notes the collectives that are called while it is entered."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").removesuffix("_")
            # Takes the input; the first argument of allgather is its output.
            tensor = args[1 if name == "allgather" else 0][0]
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.lines.append(f"{name} {list(tensor.shape)} {dtype}\n")
        return func(*args, **(kwargs or {}))


def write(path, net):
    tensors = list(net.parameters()) + list(net.buffers())
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    path.write_bytes(flat.numpy().tobytes())


def mismatch():
    for net in (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
                nn.Linear(3, 2)):
        with contextlib.suppress(RuntimeError):
            DistributedDataParallel(net)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init-method", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--output", type=Path)
    # Uses a device map: plain "gloo" makes a group for each device type.
    parser.add_argument("--backend", default="cpu:gloo")
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument("jobs", nargs="*")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(
        args.backend, init_method=args.init_method, rank=args.rank,
        world_size=args.world_size, timeout=timedelta(seconds=30))
    if args.mismatch:
        mismatch()
    for job in args.jobs:
        kind, cap, accumulate, option = job.split(":")
        cap = None if cap == "default" else float(cap)
        with RecordedOperations() as recorded:
            net = train(kind, cap, int(accumulate), option, args.rank)
        file = f"{args.output}/{job}:{args.rank}"
        Path(file + ".ops").write_text("".join(recorded.lines))
        write(Path(file + ".state"), net)
    dist.destroy_process_group()
    # Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
    # ("terminate called without an active exception", 2 runs of 85) after all
    # is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
