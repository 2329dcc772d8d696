"""The training steps of `./dev bench` in Python: DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 ddp_peer.py --model mlp

Every rank trains the same model on its own samples, on one thread: the next
batch, zero_grad, forward, loss, backward, the optimizer's step. A step takes as
long as it took the slowest rank. Rank 0 prints one line of JSON
(docs/internals/benchmarks.md):

    {"peer": "python", "model": "mlp", "optimizer": "sgd", "ddp": true,
     "backend": "gloo", "ranks": 2, "batch_size": 32, "parameters": 4241409,
     "steps": 100, "warmup": 20, "median_us": ..., "mean_us": ...,
     "p10_us": ..., "p90_us": ..., "cpu_us": ..., "switches": ...,
     "memory_mib": {...}}

With --backend nccl every rank trains on its GPU, and a step ends when the GPU
has done it. With --no-ddp as many ranks run at the same time and do not communicate: what
the step itself costs on this machine.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 2048


@dataclasses.dataclass
class Workload:
    """What is trained; benchmarks/ddp_step/workloads.cpp has the same."""

    batch_size: int  # samples on each rank, if none is asked for
    model: Callable[[], nn.Module]
    batches: Callable[[int], object]  # batch size -> batches without end
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fixed(data, target):
    """Yields the same random tensors in every step."""
    torch.manual_seed(1 + dist.get_rank())
    return itertools.repeat((torch.randn(data), torch.randn(target)))


def loaded(batch_size):
    """Yields batches of 2,048 samples in memory, to each rank its part of them,
    epoch after epoch."""
    torch.manual_seed(1)  # one dataset for all ranks
    # A list, as in the tutorial; it is the cheapest for the loader to collate.
    dataset = [(torch.rand(20), torch.rand(1)) for _ in range(SAMPLES)]
    loader = DataLoader(dataset, batch_size=batch_size, pin_memory=False,
                        shuffle=False, sampler=DistributedSampler(dataset))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def mlp():
    return nn.Sequential(
        nn.Linear(20, 2048), nn.ReLU(),
        nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 1))


def narrow():
    """66 layers of 64: many small parameters."""
    layers = []
    for _ in range(66):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers)


def transformer():
    """An encoder over sequences of 64 tokens that are embedded already."""
    layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS = {
    # The tutorial's whole step, with its loader and its loss.
    "tutorial": Workload(32, lambda: nn.Linear(20, 1), loaded,
                         nn.functional.cross_entropy),
    "mlp": Workload(32, mlp, lambda n: fixed((n, 20), (n, 1)), nn.MSELoss()),
    "narrow": Workload(32, narrow, lambda n: fixed((n, 64), (n, 64)),
                       nn.MSELoss()),
    "transformer": Workload(
        1, transformer, lambda n: fixed((64, n, 256), (64, n, 256)),
        nn.MSELoss()),
}

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {}),
}


def make_optimizer(name, parameters, zero):
    """Makes a fused optimizer, like ours: with the same kernels of LibTorch."""
    kind, options = OPTIMIZERS[name]
    if zero:
        # Imported here: it takes memory that the other peers should not show.
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(parameters, kind, fused=True, **options)
    return kind(parameters, fused=True, **options)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=None,
                        help="samples on each rank (default: the model's own)")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--no-ddp", action="store_true",
                        help="as many ranks, without communication")
    parser.add_argument("--zero", action="store_true",
                        help="each rank steps a part of the parameters")
    return parser.parse_args()


def device_of(backend):
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def run_steps(model, optimizer, batches, loss_of, steps, device):
    """Returns the moments before the first step, between the steps and after
    the last, in nanoseconds."""
    moments = [time.perf_counter_ns()]
    for _ in range(steps):
        data, target = next(batches)
        if device.type == "cuda":
            data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss_of(model(data), target).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter_ns())
    return moments


def greatest(values):
    """Returns the greatest of all ranks' values, element by element."""
    on = device_of(dist.get_backend())
    tensor = torch.tensor(values, dtype=torch.int64, device=on)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.cpu()


def step_figures(moments):
    us = greatest([b - a for a, b in itertools.pairwise(moments)]
                  ).double() / 1000
    low, middle, high = torch.quantile(
        us, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"median_us": round(middle, 2),
            "mean_us": round(us.mean().item(), 2), "p10_us": round(low, 2),
            "p90_us": round(high, 2)}


def usage():
    """Returns microseconds of all cores, and context switches, until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (round((used.ru_utime + used.ru_stime) * 1e6),
            used.ru_nvcsw + used.ru_nivcsw)


def usage_figures(before, after, steps):
    cpu, switches = greatest([b - a for a, b in zip(before, after)]).tolist()
    return {"cpu_us": round(cpu / steps, 1),
            "switches": round(switches / steps, 1)}


def memory():
    """Returns KiB: resident now, its peak, this process's share of it, and
    what no other process has."""
    sizes = {}
    for file in ("status", "smaps_rollup"):
        for line in pathlib.Path(f"/proc/self/{file}").read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB":
                sizes[words[0].rstrip(":")] = int(words[1])
    return {"peak_rss": sizes["VmHWM"], "rss": sizes["Rss"],
            "pss": sizes["Pss"],
            "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def memory_figures(start):
    dist.barrier()  # every rank has made what it shares
    now = memory()
    dist.barrier()  # no rank has gone while others count
    kib = {"start_rss": start["rss"], **now}
    return {name: round(most / 1024, 1) for name, most in
            zip(kib, greatest(list(kib.values())).tolist())}


def main():
    args = parse_args()
    torch.set_num_threads(1)
    device = device_of(args.backend)
    dist.init_process_group(args.backend)
    start = memory()

    workload = MODELS[args.model]
    batch_size = args.batch_size or workload.batch_size
    torch.manual_seed(0)
    model = workload.model().to(device)
    if not args.no_ddp:
        # As ours by default: gradients lie in the buckets.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(args.optimizer, model.parameters(), args.zero)
    batches = workload.batches(batch_size)

    dist.barrier()
    run_steps(model, optimizer, batches, workload.loss, args.warmup, device)
    before = usage()
    moments = run_steps(model, optimizer, batches, workload.loss, args.steps,
                        device)
    after = usage()

    line = {
        "peer": "python", "model": args.model, "optimizer": args.optimizer,
        "ddp": not args.no_ddp, "zero": args.zero, "backend": args.backend,
        "ranks": dist.get_world_size(), "batch_size": batch_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps, "warmup": args.warmup,
        **step_figures(moments), **usage_figures(before, after, args.steps),
        "memory_mib": memory_figures(start)}
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
