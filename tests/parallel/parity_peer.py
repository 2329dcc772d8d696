"""Trains an MLP by Python's DistributedDataParallel, for parity tests.

    torchrun --standalone --nproc-per-node=2 parity_peer.py \\
        --sizes 20,64,1 --optimizer adam --dtype float64 --sampler-seed 3 \\
        --initial initial.bin --data data.bin --output final.bin

Model: Linear(sizes[0], sizes[1]), Tanh, Linear(sizes[1], sizes[2]), ... with no
Tanh behind the last. Loss: mean squared error. One step takes one batch a rank
from DistributedSampler(seed=--sampler-seed), in its order, with set_epoch
whenever the samples are used up; --accumulate N makes a step of N batches, all
but the last under no_sync(), each loss divided by N.

Files are flat arrays of --dtype, little endian, without a header:
  initial, output   the parameters in the order of parameters(): weight
                    [out, in] row by row, then bias [out], layer by layer
  data              all samples [--samples, sizes[0]], then all targets
                    [--samples, sizes[-1]]
  losses            (if named) the loss of each step, averaged over the ranks

--jobs FILE runs several trainings, one behind the other: each line of the file
holds the arguments of one, as above.
"""

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "sgd_momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
}


def parse_args(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="20,64,1",
                        type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8,
                        help="samples on each rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--sampler-seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--initial", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(arguments)


def read(path, shapes, dtype):
    """The file's numbers as tensors of `shapes`, one behind the other."""
    flat = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    if flat.numel() != sum(lengths):
        raise ValueError(f"{path}: holds {flat.numel()} numbers of {dtype}, "
                         f"expected {sum(lengths)}")
    return [part.view(shape).clone()
            for part, shape in zip(flat.split(lengths), shapes)]


def write(path, tensors):
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    path.write_bytes(flat.numpy().tobytes())


def make_model(sizes, dtype):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(sampler, size):
    """Batches of indices without end, epoch after epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from torch.tensor(list(sampler)).split(size)
        epoch += 1


def train(args):
    dtype = DTYPES[args.dtype]

    plain = make_model(args.sizes, dtype)
    initial = read(args.initial, [p.shape for p in plain.parameters()], dtype)
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), initial):
            parameter.copy_(value)
    data, target = read(args.data, [(args.samples, args.sizes[0]),
                                    (args.samples, args.sizes[-1])], dtype)

    model = DistributedDataParallel(plain)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    source = batches(DistributedSampler(range(args.samples),
                                        seed=args.sampler_seed),
                     args.batch_size)
    losses = torch.zeros(args.steps, dtype=dtype)
    for step in range(args.steps):
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            last = micro == args.accumulate - 1
            rows = next(source)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(data[rows]), target[rows])
                loss = loss / args.accumulate
                loss.backward()
            losses[step] += loss.detach()
        optimizer.step()

    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    if dist.get_rank() == 0:
        write(args.output, plain.parameters())
        if args.losses:
            write(args.losses, [losses])


def main():
    if sys.argv[1] == "--jobs":
        jobs = map(shlex.split, Path(sys.argv[2]).read_text().splitlines())
    else:
        jobs = [sys.argv[1:]]
    jobs = [parse_args(job) for job in jobs]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in jobs:
        train(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
