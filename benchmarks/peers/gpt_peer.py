"""The example gpt in Python, for `./dev bench sharded`.

    torchrun --standalone --nproc-per-node=2 gpt_peer.py --parallel fsdp \
        --text FILE --report FILE

It is the model, the data, the optimizer and the schedule of examples/gpt.cpp,
and the options have the names of that program. --parallel is

    ddp     DistributedDataParallel
    fsdp    fully_shard (FSDP2) of every block and of the model
    tensor  parallelize_module: linear layers divided by column and by row, the
            embedding and the head by vocabulary, loss_parallel

Rank 0 writes the report as JSON, in the fields of ours that both have:

    {"losses": [...], "step_seconds": [...], "tokens_per_second": ...,
     "peak_memory_bytes": ..., "parameters": ...}

docs/internals/benchmarks.md says what was chosen so that Python is fast.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleOutput, RowwiseParallel, loss_parallel,
    parallelize_module)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data.distributed import DistributedSampler

VOCABULARY = 256  # bytes
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_size = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def attention(self, x):
        # In tensor parallel a rank has some of the heads: -1.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True)
        return self.projection(seen.transpose(1, 2).flatten(-2))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.checkpoints = args.checkpoint
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        nn.init.normal_(self.tokens.weight, 0, 0.02)
        nn.init.normal_(self.positions.weight, 0, 0.02)
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)
        self.register_buffer("places", torch.arange(args.context), False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(self.places)
        for block in self.blocks:
            x = (checkpoint(block, x, use_reentrant=False)
                 if self.checkpoints else block(x))
        return self.head(self.norm(x))


def divide(model, args):
    """Returns the model, divided or wrapped as --parallel asks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if args.parallel == "ddp":
        # As ours by default: gradients lie in the buckets.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=args.reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=args.reshard)
    for block in model.blocks:
        parallelize_module(block, mesh, {
            # One input for three layers, so that backward adds up its gradient
            # once and not three times.
            "norm1": PrepareModuleOutput(
                output_layouts=Replicate(),
                desired_output_layouts=Replicate(), use_local_output=False),
            **{name: ColwiseParallel()
               for name in ("query", "key", "value", "up")},
            "projection": RowwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        # The loss takes the part of the logits that each rank has.
        "head": ColwiseParallel(output_layouts=Shard(-1),
                                use_local_output=False)})


def make_optimizer(model):
    """Makes a fused AdamW: the kernel of ours. A kernel takes either DTensors or
    tensors, so each has groups of its own."""
    groups = {}
    for parameter in model.parameters():
        key = (parameter.dim() >= 2, isinstance(parameter, DTensor))
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": WEIGHT_DECAY if decays else 0.0}
         for (decays, _), group in groups.items()],
        betas=BETAS, fused=True)


def clip_gradients(parameters):
    """Does what clip_grad_norm_ does, which takes no mixture of DTensors and
    tensors, and for DTensors does one all_reduce for each. This is one for
    all."""
    own, divided = [], []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            is_divided = any(p.is_shard() for p in grad.placements)
            if not is_divided and any(p.is_partial() for p in grad.placements):
                raise RuntimeError(f"a gradient is {grad.placements}")
            (divided if is_divided else own).append(grad.to_local())
        else:
            own.append(grad)
    squares = torch.zeros(())
    if divided:
        squares = torch.stack(torch._foreach_norm(divided)).square().sum()
        dist.all_reduce(squares)
    if own:
        squares += torch.stack(torch._foreach_norm(own)).square().sum()
    factor = (MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(own + divided, factor)


def rate(step, args):
    """Returns the learning rate: a warm-up, and half a cosine."""
    warm_up = args.steps // 20 + 1
    if step < warm_up:
        return args.lr * (0.1 + 0.9 * step / warm_up)
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Batches:
    """The sequences of the text in the order of the sampler, to each rank its
    part of them; in tensor parallel every rank takes all."""

    def __init__(self, args):
        text = pathlib.Path(args.text).read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.columns = torch.arange(args.context + 1)
        self.context = args.context
        sequences = range((len(text) - 1) // args.context)
        ranks, rank = ((1, 0) if args.parallel == "tensor" else
                       (dist.get_world_size(), dist.get_rank()))
        self.size = args.batch_size // ranks
        self.sampler = DistributedSampler(sequences, ranks, rank,
                                          seed=args.seed, drop_last=True)

    def __iter__(self):
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            order = torch.tensor(list(self.sampler)) * self.context
            for starts in order.split(self.size):
                if len(starts) == self.size:
                    rows = self.text[starts[:, None] + self.columns]
                    yield rows[:, :-1], rows[:, 1:]


def train(model, args):
    """Returns the loss and the seconds of each step on this rank."""
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())
    losses, seconds = [], []
    with (loss_parallel() if args.parallel == "tensor"
          else contextlib.nullcontext()):
        for tokens, targets in itertools.islice(Batches(args), args.steps):
            begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate(len(losses), args)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            clip_gradients(parameters)
            optimizer.step()
            losses.append(loss.detach())
            seconds.append(time.perf_counter() - begin)
    return losses, seconds


def summary(losses, seconds, parameters, args):
    """Returns the report: the mean loss of the ranks, and the time of the
    slowest."""
    if args.parallel == "tensor":
        losses = [loss.full_tensor() if isinstance(loss, DTensor) else loss
                  for loss in losses]
    means = torch.stack(losses)
    dist.all_reduce(means)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = slowest.tolist()
    peak = torch.tensor(peak_memory())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {
        "peer": "python", "parallel": args.parallel,
        "parameters": parameters,
        "losses": (means / dist.get_world_size()).tolist(),
        "step_seconds": seconds,
        "tokens_per_second": args.batch_size * args.context /
                             statistics.median(seconds),
        "peak_memory_bytes": peak.item()}


def peak_memory():
    """Returns the highest resident memory of this process, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "tensor"),
                        required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--context", type=int, default=128,
                        help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=16,
                        help="sequences of a step, all ranks together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", required=True)
    parser.add_argument("--checkpoint", action="store_true",
                        help="computes blocks again in backward")
    parser.add_argument("--reshard", action="store_true",
                        help="fsdp: free what was gathered until backward")
    parser.add_argument("--report", type=pathlib.Path)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # The modules are made in the order of ours, and so the first values are the
    # same.
    torch.manual_seed(args.seed)
    model = Gpt(args)
    parameters = sum(p.numel() for p in model.parameters())
    report = summary(*train(divide(model, args), args), parameters, args)
    if dist.get_rank() == 0 and args.report:
        args.report.write_text(json.dumps(report) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
