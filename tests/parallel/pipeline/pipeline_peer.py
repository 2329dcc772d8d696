"""Trains by Python's pipelining, for pipeline_parity_test.cpp.

    torchrun --standalone --nproc-per-node=2 pipeline_peer.py FOLDER

FOLDER/cases.txt has a line for each case: name of the schedule, micro-batches,
stages a rank, rows of a batch. FOLDER/initial.pt has the model's parameters by
name, and the batches x and y, [steps, rows, width]. Rank r writes
FOLDER/<case>.<r>.pt, a dict of tensors: the parameters of its stages
afterwards, and on the rank of the last stage the losses, [steps, micro-batches].
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class


def block(initial, stage):
    width = initial[f"{3 * stage}.weight"].size(0)
    layers = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width, eps=0.1))
    layers = layers.to(torch.float64)
    with torch.no_grad():
        for index in (0, 2):
            for name in ("weight", "bias"):
                getattr(layers[index], name).copy_(
                    initial[f"{3 * stage + index}.{name}"])
    return layers


def train(folder, case, name, micro_batches, per_rank, initial):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = ranks * per_rank
    if name == "ZBVZeroBubble":
        mine = [rank, stages - 1 - rank]
    else:
        mine = list(range(rank, stages, ranks))
    made = [PipelineStage(block(initial, stage), stage, stages,
                          torch.device("cpu")) for stage in mine]
    single = name in ("GPipe", "1F1B")
    schedule = get_schedule_class(name)(
        made[0] if single else made, micro_batches,
        loss_fn=nn.functional.mse_loss)
    parameters = [p for stage in made for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    written = {}
    losses_of_steps = []
    for x, y in zip(initial["x"], initial["y"]):
        optimizer.zero_grad()
        losses = []
        inputs = (x,) if 0 in mine else ()
        last = stages - 1 in mine
        schedule.step(*inputs, target=y if last else None,
                      losses=losses if last else None)
        if last:
            losses_of_steps.append(torch.stack([l.detach() for l in losses]))
        optimizer.step()
    if losses_of_steps:
        written["losses"] = torch.stack(losses_of_steps)
    for stage, module in zip(mine, made):
        for index in (0, 2):
            for kind in ("weight", "bias"):
                written[f"{3 * stage + index}.{kind}"] = getattr(
                    module.submod[index], kind).detach()
    torch.save(written, folder / f"{case}.{rank}.pt")


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    initial = torch.load(folder / "initial.pt")
    for case, line in enumerate((folder / "cases.txt").read_text().splitlines()):
        name, micro_batches, per_rank = line.split()
        train(folder, case, name, int(micro_batches), int(per_rank), initial)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


main()
