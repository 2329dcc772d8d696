"""Runs Python's communication hooks on gradients from files.

    torchrun --standalone --nproc-per-node=2 comm_hooks_peer.py CASES

CASES is a file of JSON: a list of objects with
  name       of the files beside CASES: NAME.RANK.in and NAME.RANK.out
  hook       a function of torch.distributed.algorithms.ddp_comm_hooks
  wrapper    the name of a wrapper of it, or ""
  state      null: the process group; else arguments of PowerSGDState, and
             "q_memory": the first Qs, bucket by bucket
  dtype      of the gradients
  steps      how often the hook sees each bucket
  buckets    for each bucket the shapes of its gradients
The files hold the gradients before and behind the hook, flat, step by step and
bucket by bucket.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks, powerSGD_hook, quantization_hooks)

PLACES = [default_hooks, powerSGD_hook, quantization_hooks]
orthogonalize = powerSGD_hook._orthogonalize


def orthogonalize_any(matrices, epsilon=0):
    """batched_powerSGD_hook of torch 2.13 gives a matrix, where a batch of
    them is asserted."""
    batch = matrices if matrices.dim() == 3 else matrices.unsqueeze(0)
    orthogonalize(batch, epsilon)


class DoneAtOnce:
    """torch.distributed, whose asynchronous operations are done when they
    return: the hooks' callbacks run in this thread, not in Gloo's, where they
    would outlive the interpreter now and then. The future of all_gather has all
    in one tensor, as the quantization hooks of torch 2.13 expect and Gloo does
    not give it."""

    def __getattr__(self, name):
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor, group, async_op):
        dist.all_reduce(tensor, group=group)
        return done([tensor])

    @staticmethod
    def all_gather(tensors, tensor, group, async_op):
        dist.all_gather(tensors, tensor, group=group)
        return done([torch.stack(tensors)])


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return types.SimpleNamespace(get_future=lambda: future)


class Bucket:
    """What the hooks use of torch.distributed.GradBucket."""

    def __init__(self, flat, shapes, index, last):
        self.flat = flat
        self.shapes = shapes
        self.place = index
        self.last = last

    def index(self):
        return self.place

    def is_last(self):
        return self.last

    def buffer(self):
        return self.flat

    def set_buffer(self, flat):
        self.flat = flat

    def gradients(self):
        lengths = [torch.Size(shape).numel() for shape in self.shapes]
        return [part.view(shape)
                for part, shape in zip(self.flat.split(lengths), self.shapes)]


def find(name):
    return next(getattr(place, name) for place in PLACES
                if hasattr(place, name))


def run(case, folder):
    dtype = getattr(torch, case["dtype"])
    file = f"{case['name']}.{dist.get_rank()}"
    numbers = torch.frombuffer(
        bytearray((folder / f"{file}.in").read_bytes()), dtype=dtype)
    hook = find(case["hook"])
    if case["wrapper"]:
        hook = find(case["wrapper"])(hook)
    state = dist.group.WORLD
    if case["state"] is not None:
        arguments = dict(case["state"])
        first = arguments.pop("q_memory", [])
        state = powerSGD_hook.PowerSGDState(None, **arguments)
        for index, q in enumerate(first):
            state.q_memory_dict[index] = torch.tensor(q, dtype=dtype)
            state.p_memory_dict[index] = torch.empty(
                case["p_memory"][index], dtype=dtype)
    results = []
    offset = 0
    for _ in range(case["steps"]):
        for index, shapes in enumerate(case["buckets"]):
            count = sum(torch.Size(shape).numel() for shape in shapes)
            flat = numbers[offset:offset + count].clone()
            offset += count
            bucket = Bucket(flat, shapes, index,
                            index + 1 == len(case["buckets"]))
            result = hook(state, bucket).wait()
            results.append(result.to(dtype).clone())
    (folder / f"{file}.out").write_bytes(torch.cat(results).numpy().tobytes())


def main():
    cases = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    powerSGD_hook._orthogonalize = orthogonalize_any
    for place in PLACES:
        place.dist = DoneAtOnce()
    for case in json.loads(cases.read_text()):
        run(case, cases.parent)
    dist.destroy_process_group()
    # Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
    # ("terminate called without an active exception") after all is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
