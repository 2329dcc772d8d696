"""Trains the cases of the parity tests by Python's DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 peer.py cases.json

cases.json is what write_cases() in cases.cpp makes; a case's fields are
explained in cases.h. Each rank writes <name>.<rank>.pt beside it, a dict of
tensors:

    data, target    all samples, and what the model is to say of each
    initial.<name>  its own state_dict before training; ranks differ, as
                    DistributedDataParallel begins with rank 0's
    final.<name>    its own state_dict afterwards
    losses          of its steps, [steps]; of those it has not taken 0
    norms           of the gradients, [steps], if they are clipped by norm
    scales          behind each step, [steps], with grad_scaler
"""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks, powerSGD_hook)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data.distributed import DistributedSampler

from models import MODELS, loss_of, make_data

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}


class MixedPrecisionModel:
    """What mixed_precision means, in so many words: Python's own needs streams
    and events, so a GPU."""

    LOW = torch.bfloat16

    def __init__(self, plain):
        self.plain = plain
        for parameter in plain.parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self.average)

    def __call__(self, data):
        low = {name: parameter.to(self.LOW)
               for name, parameter in self.plain.named_parameters()}
        return torch.func.functional_call(self.plain, low, data.to(self.LOW))

    def average(self, parameter):
        gradient = parameter.grad.to(self.LOW)
        dist.all_reduce(gradient)
        parameter.grad = gradient.div_(dist.get_world_size()).to(
            parameter.dtype)


def make_optimizer(case, parameters):
    name = case["optimizer"]
    kind, options = OPTIMIZERS[name.removeprefix("fused_")]
    options = {"lr": case["lr"], "fused": name.startswith("fused_"), **options}
    if case["zero"]:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=kind,
                                       **options)
    return kind(parameters, **options)


def ddp_options(case):
    options = {name: case[name]
               for name in ("find_unused_parameters", "static_graph")}
    if not case["broadcast_buffers"]:
        options["broadcast_buffers"] = False
    if case["bucket_cap_mb"]:
        options["bucket_cap_mb"] = case["bucket_cap_mb"]
    return options


def compress_hook(dtype, bucket):
    """fp16_compress_hook and bf16_compress_hook, which itself refuses to run
    without a GPU."""
    return default_hooks._compress_hook(dtype, dist.group.WORLD, bucket)


def register_hook(model, case, job):
    halves = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if case["hook"] == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif case["hook"] in halves:
        model.register_comm_hook(halves[case["hook"]], compress_hook)
    elif case["hook"] == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=case["power_sgd_rank"],
            start_powerSGD_iter=job["start_power_sgd"],
            min_compression_rate=1,
            batch_tensors_with_same_shape=case["batch_tensors_with_same_shape"])
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class ParallelModel(DistributedDataParallel):
    """A rank that has joined tells the others which parameters it used. Python
    tells them what was used in its last iteration by any rank; here: none."""

    def _match_unused_params_allreduce(self):
        self.reducer._get_local_used_map().zero_()
        super()._match_unused_params_allreduce()


class Training:
    def __init__(self, case, job):
        self.case = case
        self.job = job
        rank = dist.get_rank()
        dtype = getattr(torch, case["dtype"])
        torch.manual_seed(1 + rank)
        self.plain = MODELS[case["model"]]().to(dtype)
        torch.manual_seed(100)
        data, target = make_data(case["model"], job["samples"], dtype)
        self.record = {"data": data, "target": target}
        self.note_state("initial.")

        if case["mixed_precision"]:
            self.model = MixedPrecisionModel(self.plain)
        else:
            self.model = ParallelModel(self.plain, **ddp_options(case))
            register_hook(self.model, case, job)
        self.optimizer = make_optimizer(case, self.plain.parameters())
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=job["init_scale"],
            growth_interval=job["growth_interval"],
            enabled=case["grad_scaler"])
        self.steps = job["steps"] - (case["early"] if rank == 0 else 0)
        series = ["losses"]
        series += ["norms"] * (case["clip"] == "norm")
        series += ["scales"] * case["grad_scaler"]
        for name in series:
            self.record[name] = torch.zeros(job["steps"], dtype=dtype)
        self.batches = self.make_batches()

    def make_batches(self):
        """Without end, epoch after epoch."""
        sampler = DistributedSampler(range(self.job["samples"]),
                                     seed=self.job["sampler_seed"])
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            for rows in torch.tensor(list(sampler)).split(
                    self.job["batch_size"]):
                yield self.record["data"][rows], self.record["target"][rows]
            epoch += 1

    def note_state(self, prefix):
        for name, value in self.plain.state_dict().items():
            self.record[prefix + name] = value.detach().clone()

    def loss_factor(self, step):
        infinite = [step, dist.get_rank()] in self.job["infinite_losses"]
        return float("inf") if self.case["grad_scaler"] and infinite else 1

    def backward(self, step):
        data, target = next(self.batches)
        with torch.autocast("cpu", torch.bfloat16, self.case["autocast"]):
            loss = loss_of(self.model(data), target) / self.case["accumulate"]
        self.record["losses"][step] += loss.detach()
        self.scaler.scale(loss * self.loss_factor(step)).backward()

    def clip(self, step):
        if self.case["clip"] == "norm":
            self.record["norms"][step] = clip_grad_norm_(
                self.plain.parameters(), self.job["max_norm"])
        else:
            clip_grad_value_(self.plain.parameters(), self.job["clip_value"])

    def step(self, step):
        self.optimizer.zero_grad()
        for micro in range(self.case["accumulate"]):
            last = micro == self.case["accumulate"] - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.backward(step)
        if self.case["clip"]:
            self.scaler.unscale_(self.optimizer)
            self.clip(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.case["grad_scaler"]:
            self.record["scales"][step] = self.scaler.get_scale()

    def joined(self):
        if not self.case["early"]:
            return contextlib.nullcontext()
        by_initial = self.case["divide_by_initial_world_size"]
        return self.model.join(divide_by_initial_world_size=by_initial)

    def run(self):
        with self.joined():
            for step in range(self.steps):
                self.step(step)
        self.note_state("final.")
        return self.record


def main():
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in job["cases"]:
        record = Training(case, job).run()
        torch.save(record,
                   path.parent / f"{case['name']}.{dist.get_rank()}.pt")
    dist.destroy_process_group()
    # Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
    # ("terminate called without an active exception") after all is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
