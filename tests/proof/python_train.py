"""Trains the transformer of transformer.h with Python's own parallelism.

    torchrun --nproc-per-node=2 python_train.py CASES FOLDER

Each line of CASES is a name and options, those of Options below. FOLDER/first.pt
has the first values and the batches, written by proof_train. Rank 0 writes
FOLDER/NAME.python.json: the loss and the norm of the gradients of each step, and
the whole parameters afterwards.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module)

VOCABULARY, FEATURES, HIDDEN, HEADS = 32, 32, 64, 8
BLOCKS, LENGTH, MICRO_BATCHES = 4, 16, 4
MAX_NORM = 0.4


def parse(words):
    options = argparse.ArgumentParser()
    for axis in ("data", "shard", "tensor", "pipeline"):
        options.add_argument(f"--{axis}", type=int, default=1)
    options.add_argument("--sequence-parallel", action="store_true")
    options.add_argument("--schedule", default="1F1B")
    options.add_argument("--stages-per-rank", type=int, default=1)
    # Folders of distributed checkpoints, after and before.
    options.add_argument("--save")
    options.add_argument("--load")
    return options.parse_args(words)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(FEATURES, FEATURES, bias=False))
        self.projection = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        def heads(layer):
            return layer(x).unflatten(-1, (-1, FEATURES // HEADS)).transpose(
                1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value),
            is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(FEATURES)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """The whole model, or one stage; names are those of the whole."""

    def __init__(self, index=0, stages=1):
        super().__init__()
        if index == 0:
            self.embedding = nn.Embedding(VOCABULARY, FEATURES)
            self.position = nn.Embedding(LENGTH, FEATURES)
        self.blocks = [f"block{i}" for i in range(
            index * BLOCKS // stages, (index + 1) * BLOCKS // stages)]
        for name in self.blocks:
            setattr(self, name, Block())
        if index == stages - 1:
            self.norm = nn.LayerNorm(FEATURES)
            self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, x):
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position(torch.arange(LENGTH))
        for name in self.blocks:
            x = getattr(self, name)(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tensor_plan(sequence):
    """Replicated activations between the layers, or divided sequences."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(),
                                     output_layouts=between),
        "head": ColwiseParallel(input_layouts=between,
                                output_layouts=Shard(-1),
                                use_local_output=False),
    }
    if sequence:
        plan["position"] = RowwiseParallel(input_layouts=Replicate(),
                                           output_layouts=Shard(0))
        plan["norm"] = SequenceParallel(use_local_output=True)
    for i in range(BLOCKS):
        block = f"block{i}"
        for name in ("query", "key", "value"):
            plan[f"{block}.attention.{name}"] = ColwiseParallel()
        plan[f"{block}.attention.projection"] = RowwiseParallel(
            output_layouts=between)
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=between)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan[f"{block}.norm1"] = SequenceParallel(use_local_output=True)
            plan[f"{block}.norm2"] = SequenceParallel(use_local_output=True)
            plan[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),))
    return plan


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(parameters, pipeline):
    """Clips as one process would, and returns its norm. Python has no function
    for stages, nor for DTensors of different meshes."""
    total = sum(whole(p.grad).square().sum() for p in parameters
                if p.grad is not None)
    if pipeline:
        dist.all_reduce(total)
    norm = total.sqrt()
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).item()
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm.item()


def make(options, first):
    """Returns this rank's stages by index, and the function of one step, which
    returns the loss on the ranks that have it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if options.pipeline > 1:
        stages = ranks * options.stages_per_rank
        mine = list(range(rank, stages, ranks))
        if options.schedule == "ZBVZeroBubble":
            mine = [rank, stages - 1 - rank]
        modules = [Stage(index, stages) for index in mine]
    else:
        modules = [Stage()]
    for module in modules:
        module.double()
        module.load_state_dict({name: value for name, value in first.items()
                                if name in module.state_dict()})
    if options.pipeline > 1:
        made = [PipelineStage(module, index, stages, torch.device("cpu"))
                for index, module in zip(mine, modules)]
        single = options.schedule in ("GPipe", "1F1B")
        schedule = get_schedule_class(options.schedule)(
            made[0] if single else made, MICRO_BATCHES, loss_fn=loss_of)

        def step(tokens, target):
            losses = []
            last = stages - 1 in mine
            schedule.step(*((tokens,) if 0 in mine else ()),
                          target=target if last else None,
                          losses=losses if last else None)
            return torch.stack(losses).mean().detach() if last else None

        return modules, step

    names = ("data", "shard", "tensor")
    mesh = init_device_mesh("cpu", tuple(getattr(options, n) for n in names),
                            mesh_dim_names=names)
    model = modules[0]
    if options.tensor > 1:
        parallelize_module(model, mesh["tensor"],
                           tensor_plan(options.sequence_parallel))
    if options.shard > 1:
        over = mesh["data", "shard"] if options.data > 1 else mesh["shard"]
        for name in model.blocks:
            fully_shard(getattr(model, name), mesh=over)
        fully_shard(model, mesh=over)
    forward = model
    if options.data > 1 and options.shard == 1:
        forward = nn.parallel.DistributedDataParallel(
            model, process_group=mesh["data"].get_group())

    def step(tokens, target):
        parts = options.data * options.shard
        part = rank // options.tensor
        logits = forward(tokens.chunk(parts)[part])
        if options.tensor > 1:
            with loss_parallel():
                loss = loss_of(logits, target.chunk(parts)[part])
                loss.backward()
        else:
            loss = loss_of(logits, target.chunk(parts)[part])
            loss.backward()
        return whole(loss)

    return modules, step


def train(name, options, first, batches, folder):
    modules, step = make(options, first)
    parameters = [p for module in modules for p in module.parameters()]
    if options.load:
        state = get_model_state_dict(modules[0])
        dcp.load({"model": state},
                 storage_reader=dcp.HuggingFaceStorageReader(options.load))
        modules[0].load_state_dict(state)
        batches = batches[:0]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = step(batch[:, :-1], batch[:, 1:])
        # Each group of ranks that computes one loss counts once.
        mean = torch.zeros(2, dtype=torch.float64)
        if loss is not None:
            mean = torch.stack((loss, torch.ones_like(loss)))
        dist.all_reduce(mean)
        losses.append((mean[0] / mean[1]).item())
        norms.append(clip(parameters, options.pipeline > 1))
        optimizer.step()
    if options.save:
        dcp.save(get_model_state_dict(modules[0]),
                 storage_writer=dcp.HuggingFaceStorageWriter(
                     options.save, save_distributed=True))
    values = {key: whole(value).flatten().tolist() for module in modules
              for key, value in module.named_parameters()}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    if dist.get_rank() == 0:
        together = {key: value for one in gathered for key, value in one.items()}
        (folder / f"{name}.python.json").write_text(json.dumps(
            {"losses": losses, "norms": norms, "parameters": together,
             "torch": torch.__version__}))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[2])
    first = torch.load(folder / "first.pt")
    batches = first.pop("batches")
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, *words = line.split()
        train(name, parse(words), first, batches, folder)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


main()
