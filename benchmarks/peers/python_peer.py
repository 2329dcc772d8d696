"""The steps of `./dev bench python`: each on Lockstep and on Gloo, in turns.

    lockstep run --standalone --nproc-per-node=2 PYTHON python_peer.py

with a Python in which lockstep-torch is installed. The default group is
Lockstep's, and a second group of the same ranks is Gloo's, so that one process
does the same step on both. A round does a block of steps on every side; another
side is first in each round. A step takes as long as it took the slowest rank.
Rank 0 prints one line of JSON:

    {"cases": [{"name": "ddp_mlp", "sides": {
        "lockstep": [{"median_ms": ..., "p90_ms": ...}, ...], ...}}, ...]}

with an entry for each round. --deepspeed names the library that
deepspeed_op.py has compiled; without it, that side is left out.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_peer import MODELS, make_optimizer, run_steps, step_figures

QUICK_SHARE = 5
CPU = torch.device("cpu")
# The level of processor that DeepSpeed's operation needs for a dtype.
DEEPSPEED_LEVELS = {torch.float32: 1, torch.bfloat16: 2}


# --- Training steps. A side is a function: steps -> the moments between them.

def training(model, workload, optimizer):
    optimizer = make_optimizer(optimizer, model.parameters(), zero=False)
    batches = workload.batches(workload.batch_size)
    return lambda steps: run_steps(model, optimizer, batches, workload.loss,
                                   steps, CPU)


def without_communication(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp(name, optimizer, group, hook=None):
    workload = MODELS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model(), process_group=group,
                                    gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return training(model, workload, optimizer)


def ddp_sides(name, optimizer, groups):
    sides = {backend: ddp(name, optimizer, group)
             for backend, group in groups.items()}
    sides["no_hook"] = ddp(name, optimizer, groups["lockstep"],
                           without_communication)
    return sides


def fsdp(group, from_group=False):
    workload = MODELS["transformer"]
    torch.manual_seed(0)
    model = workload.model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        if from_group:
            module.set_allocate_memory_from_process_group_for_comm(True)
    return training(model, workload, "adamw")


def fsdp_sides(groups):
    sides = {backend: fsdp(group) for backend, group in groups.items()}
    sides["from_group"] = fsdp(groups["lockstep"], from_group=True)
    return sides


# --- A token of a transformer that is divided over the ranks.

class Layer(nn.Module):
    """Attention and MLP of the next token of each sequence. A rank has a part
    of the heads and of the MLP, and two sums make the result whole."""

    width, heads, context = 1024, 16, 128

    def __init__(self, batch_size, dtype, reduce):
        super().__init__()
        ranks = dist.get_world_size()
        self.reduce = reduce
        self.own_heads = self.heads // ranks
        size = self.width // self.heads
        own = self.own_heads * size
        self.norm1 = nn.LayerNorm(self.width)
        self.query_key_value = nn.Linear(self.width, 3 * own)
        self.projection = nn.Linear(own, self.width, bias=False)
        self.norm2 = nn.LayerNorm(self.width)
        self.up = nn.Linear(self.width, 4 * self.width // ranks)
        self.down = nn.Linear(4 * self.width // ranks, self.width, bias=False)
        self.to(dtype)
        shape = (batch_size, self.own_heads, self.context, size)
        self.keys = torch.randn(shape, dtype=dtype)
        self.values = torch.randn(shape, dtype=dtype)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.own_heads, -1)).unsqueeze(2)
            for part in self.query_key_value(self.norm1(x)).chunk(3, -1))
        self.keys[:, :, -1:], self.values[:, :, -1:] = key, value
        seen = nn.functional.scaled_dot_product_attention(
            query, self.keys, self.values)
        x = x + self.reduce(self.projection(seen.flatten(1)))
        return x + self.reduce(self.down(
            nn.functional.gelu(self.up(self.norm2(x)))))


def decoding(batch_size, dtype, reduce):
    torch.manual_seed(dist.get_rank())
    layer = Layer(batch_size, dtype, reduce)
    torch.manual_seed(0)
    x = torch.randn(batch_size, Layer.width, dtype=dtype)

    @torch.inference_mode()
    def run(steps):
        moments = [time.perf_counter_ns()]
        for _ in range(steps):
            layer(x)
            moments.append(time.perf_counter_ns())
        return moments

    run.output = torch.inference_mode()(lambda: layer(x))
    return run


def reduce_in(group):
    def reduce(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor
    return reduce


def decode_sides(batch_size, dtype, groups, deepspeed):
    reduces = {backend: reduce_in(group) for backend, group in groups.items()}
    if deepspeed and deepspeed.vector_kernel_level() >= DEEPSPEED_LEVELS[dtype]:
        reduces["deepspeed"] = torch.ops.deepspeed.inference_all_reduce_
    sides = {name: decoding(batch_size, dtype, reduce)
             for name, reduce in reduces.items()}
    outputs = {name: side.output() for name, side in sides.items()}
    for name, output in outputs.items():
        torch.testing.assert_close(output, outputs["gloo"], msg=lambda text: (
            f"{name} and Gloo have other results: {text}"))
    return sides


def load_deepspeed(path):
    """Returns DeepSpeed's module, which makes the operation known to torch."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("deepspeed_shm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The name under which DeepSpeed expects the number of ranks of this host.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    module.initialize(dist.get_world_size(), dist.get_rank())
    dist.barrier()
    # Its memory stays when the process has ended.
    for left in pathlib.Path("/dev/shm").glob(
            f"deepspeed_*_{os.environ['MASTER_PORT']}_{dist.get_rank()}"):
        left.unlink()
    return module


# --- The rounds.

def cases(groups, deepspeed):
    """Yields the name, steps of a block, and what makes the sides of each."""
    for model, optimizer, steps in (("tutorial", "sgd", 300), ("mlp", "sgd", 12),
                                    ("transformer", "adamw", 15)):
        yield (f"ddp_{model}", steps,
               lambda: ddp_sides(model, optimizer, groups))
    for dtype in (torch.float32, torch.bfloat16):
        for batch_size in (1, 8):
            yield (f"decode_{str(dtype).removeprefix('torch.')}_{batch_size}",
                   100, lambda: decode_sides(batch_size, dtype, groups, deepspeed))
    yield "fsdp", 12, lambda: fsdp_sides(groups)


def measure(sides, steps, rounds):
    """Returns the figures of each round for each side."""
    names = list(sides)
    figures = {name: [] for name in names}
    for side in sides.values():
        side(max(3, steps // 5))
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            us = step_figures(sides[name](steps))
            figures[name].append({
                "median_ms": round(us["median_us"] / 1000, 5),
                "p90_ms": round(us["p90_us"] / 1000, 5)})
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--deepspeed", metavar="LIBRARY")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("lockstep")
    groups = {"lockstep": dist.group.WORLD,
              "gloo": dist.new_group(backend="gloo")}
    deepspeed = load_deepspeed(args.deepspeed)
    results = []
    for name, steps, make in cases(groups, deepspeed):
        steps = max(3, steps // QUICK_SHARE) if args.quick else steps
        results.append({"name": name,
                        "sides": measure(make(), steps, args.rounds)})
    if dist.get_rank() == 0:
        print(json.dumps({"cases": results}), flush=True)
    dist.barrier()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
