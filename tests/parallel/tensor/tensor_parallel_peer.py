"""Trains models with Python's tensor parallelism, for C++ ranks to compare.

    torchrun --standalone --nproc-per-node=2 tensor_parallel_peer.py FOLDER

FOLDER/<case>.input holds float64 numbers: all parameters of the model of one
process in the order of parameters(), then the data. FOLDER/<case>.output gets,
for each step of SGD, the loss and all whole gradients; then all whole
parameters.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module)

STEPS = 3
LEARNING_RATE = 0.1
BATCH, LENGTH, FEATURES, HIDDEN, HEADS, CLASSES = 2, 6, 8, 12, 4, 13


class Mlp(nn.Module):
    """Replicated input and output."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def loss(self, data):
        x = data.view(BATCH, LENGTH, FEATURES)
        return self.down(F.gelu(self.up(x))).square().mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(FEATURES, FEATURES)
        self.key = nn.Linear(FEATURES, FEATURES)
        self.value = nn.Linear(FEATURES, FEATURES)
        self.projection = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        def heads(layer):
            return layer(x).unflatten(-1, (-1, FEATURES // HEADS)).transpose(
                1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value),
            is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Sequence parallel between the layers, and a parallel loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.norm1 = nn.LayerNorm(FEATURES)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    PLAN = {
        "embedding": RowwiseParallel(input_layouts=Replicate(),
                                     output_layouts=Shard(1)),
        "norm1": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),),
                                        desired_input_layouts=(Replicate(),)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.projection": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1),
                                output_layouts=Shard(-1),
                                use_local_output=False),
    }

    def loss(self, data):
        tokens = data.view(BATCH, LENGTH + 1).long()
        x = self.embedding(tokens[:, :-1])
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1),
                               tokens[:, 1:].flatten())


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def work(kind, path, mesh):
    flat = torch.frombuffer(
        bytearray(path.with_suffix(".input").read_bytes()),
        dtype=torch.float64)
    model = kind().double()
    with torch.no_grad():
        for parameter in model.parameters():
            part, flat = flat.tensor_split([parameter.numel()])
            parameter.copy_(part.view_as(parameter))
    parallelize_module(model, mesh, kind.PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    written = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with loss_parallel():
            loss = model.loss(flat)
            loss.backward()
        written.append(whole(loss))
        written += [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
    written += [whole(parameter) for parameter in model.parameters()]
    if dist.get_rank() == 0:
        numbers = torch.cat([tensor.reshape(-1) for tensor in written])
        path.with_suffix(".output").write_bytes(numbers.numpy().tobytes())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = Path(sys.argv[1])
    work(Mlp, folder / "mlp", mesh)
    work(Transformer, folder / "transformer", mesh)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
