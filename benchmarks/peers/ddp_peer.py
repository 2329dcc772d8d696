"""The training steps of `./dev bench` in Python: DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 ddp_peer.py --model mlp

Every rank trains the same model on its own fixed random tensors (no loader):
zero_grad, forward, mean squared error, backward, SGD step, one thread. Rank 0
prints one line of JSON. A step takes as long as it took the slowest rank:

    {"peer": "python", "model": "mlp", "ddp": true, "backend": "gloo",
     "ranks": 2, "batch_size": 32, "parameters": 4241409, "steps": 100,
     "warmup": 20, "median_us": ..., "p10_us": ..., "p90_us": ...}

With --no-ddp as many ranks run at the same time and do not communicate: what
the step itself costs on this machine.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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


# name -> (model, features of a sample, values of a target)
MODELS = {
    "tutorial": (lambda: nn.Linear(20, 1), 20, 1),
    "mlp": (mlp, 20, 1),
    "narrow": (narrow, 64, 64),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32,
                        help="samples on each rank")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--no-ddp", action="store_true",
                        help="as many ranks, without communication")
    return parser.parse_args()


def time_steps(model, data, target, steps):
    """Nanoseconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    times = torch.empty(steps, dtype=torch.int64)
    for step in range(steps):
        begin = time.perf_counter_ns()
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
        times[step] = time.perf_counter_ns() - begin
    return times


def main():
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)

    build, features, outputs = MODELS[args.model]
    torch.manual_seed(0)
    model = build()
    if not args.no_ddp:
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randn(args.batch_size, features)
    target = torch.randn(args.batch_size, outputs)

    dist.barrier()
    times = time_steps(model, data, target, args.warmup + args.steps)
    times = times[args.warmup:]
    dist.all_reduce(times, op=dist.ReduceOp.MAX)

    if dist.get_rank() == 0:
        low, middle, high = torch.quantile(
            times.double() / 1000,
            torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        print(json.dumps({
            "peer": "python", "model": args.model, "ddp": not args.no_ddp,
            "backend": args.backend, "ranks": dist.get_world_size(),
            "batch_size": args.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": args.steps, "warmup": args.warmup,
            "median_us": round(middle, 2), "p10_us": round(low, 2),
            "p90_us": round(high, 2)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
