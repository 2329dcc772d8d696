"""Trainings by Python's own wrappers: on Lockstep they give Gloo's numbers.

Each training runs on two ranks for 20 steps, once on each backend, and prints
its losses and a digest of its parameters. Sums of two numbers do not depend on
their order, so both must be equal bit by bit.
"""

import hashlib
import os
import sys
import unittest

import ranks

STEPS = 20


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(full(tensor).detach().contiguous().view(torch.uint8)
                   .numpy().tobytes())
    return sha.hexdigest()[:16]


def full(tensor):
    from torch.distributed.tensor import DTensor
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32),
                         nn.ReLU(), nn.Linear(32, 4))


def batch(step, rank=None):
    seed = step if rank is None else 1000 * (rank + 1) + step
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(8, 16, generator=generator),
            torch.randn(8, 4, generator=generator))


def train(forward, optimizer, own_batches=True):
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank if own_batches else None)
        loss = nn.functional.mse_loss(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(**options):
    model = DistributedDataParallel(network(), **options)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    return losses, model.parameters()


def part_ddp():
    return ddp()


def part_ddp_small_buckets():
    return ddp(bucket_cap_mb=0.002, gradient_as_bucket_view=True,
               static_graph=True)


def part_ddp_mixed_precision():
    model = network()
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def forward(inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs).float()

    return train(forward, optimizer), model.parameters()


def hooked(hook, state=None):
    model = DistributedDataParallel(network())
    model.register_comm_hook(state, hook)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1))
    return losses, model.parameters()


def part_hook_fp16():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    return hooked(default_hooks.fp16_compress_hook)


def part_hook_allreduce():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    return hooked(default_hooks.allreduce_hook)


def part_hook_powersgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3,
                                        min_compression_rate=0.5)
    return hooked(powerSGD_hook.powerSGD_hook, state)


def part_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam,
                                        lr=0.01)
    return train(model, optimizer), model.parameters()


def part_post_local_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer
    model = DistributedDataParallel(network())
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, alone, 5),
        post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        averagers.PeriodicModelAverager(period=4, warmup_steps=5))
    return train(model, optimizer), model.parameters()


def sharded(from_group=False):
    from torch.distributed.fsdp import fully_shard
    model = network()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    if from_group:
        for module in (model[0], model[2], model[4], model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, optimizer


def part_fsdp():
    model, optimizer = sharded()
    return train(model, optimizer), model.parameters()


def part_fsdp_with_memory_of_the_group():
    model, optimizer = sharded(sys.argv[2] == "lockstep")
    return train(model, optimizer), model.parameters()


def part_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(network(), mesh, {
        "0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train(model, optimizer, own_batches=False), model.parameters()


def part_checkpoint():
    import tempfile
    import torch.distributed.checkpoint as dcp
    model, optimizer = sharded()
    losses = train(model, optimizer)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    other, _ = sharded()
    loaded = {"model": other.state_dict()}
    dcp.load(loaded, checkpoint_id=folder[0])
    other.load_state_dict(loaded["model"])
    assert digest(other.parameters()) == digest(model.parameters())
    return losses, other.parameters()


def part_device_mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.randn(8, 8), mesh["model"], [Shard(0)])
    moved = tensor.redistribute(placements=[Shard(1)])
    product = (tensor @ moved.redistribute(placements=[Replicate()]))
    return [], [tensor, moved, product]


def pipeline(name):
    from torch.distributed.pipelining import PipelineStage, schedules
    kind = getattr(schedules, f"Schedule{name}")
    each = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
            "DualPipeV": 2}.get(name, 1)
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    stages = size * each
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(16, 16), nn.Tanh())
               for _ in range(stages)]
    own = [rank] if each == 1 else (
        [rank, stages - 1 - rank] if v_shaped else [rank, rank + size])
    parts = [PipelineStage(modules[i], i, stages, torch.device("cpu"))
             for i in own]
    loss_of = nn.functional.mse_loss
    micro_batches = 4
    schedule = (kind(parts[0], micro_batches, loss_fn=loss_of) if each == 1
                else kind(parts, micro_batches, loss_fn=loss_of))
    parameters = [p for i in own for p in modules[i].parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 16, generator=generator)
        targets = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        have = []
        last = stages - 1 in own
        arguments = (inputs,) if 0 in own else ()
        keywords = {"target": targets, "losses": have} if last else {}
        schedule.step(*arguments, **keywords)
        optimizer.step()
        losses += [loss.item() for loss in have]
    return losses, parameters


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble",
             "ZBVZeroBubble", "DualPipeV"]
for schedule in SCHEDULES:
    globals()[f"part_pipeline_{schedule}"] = (
        lambda schedule=schedule: pipeline(schedule))

PARTS = [name.removeprefix("part_") for name in dir()
         if name.startswith("part_")]


def rank_main(backend):
    global torch, dist, nn, DistributedDataParallel, rank, size
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for part in sys.argv[3:]:
        losses, parameters = globals()[f"part_{part}"]()
        print(part, losses, digest(parameters), flush=True)
        dist.barrier()
    dist.destroy_process_group()
    if backend == "gloo":
        ranks.leave()


class Training(unittest.TestCase):

    maxDiff = None

    def test_gives_what_it_gives_on_gloo(self):
        lines = {}
        for backend in ("gloo", "lockstep"):
            ended = ranks.finish(
                ranks.start(2, __file__, "--", backend, *PARTS), seconds=300)
            for rank, (code, output, errors) in enumerate(ended):
                self.assertEqual(code, 0, f"{backend}, rank {rank}:\n{output}"
                                          f"{errors}")
                lines[backend, rank] = output.splitlines()
        for rank in range(2):
            self.assertEqual(len(lines["gloo", rank]), len(PARTS))
            for gloo, ours in zip(lines["gloo", rank], lines["lockstep", rank]):
                with self.subTest(part=gloo.split()[0], rank=rank):
                    self.assertEqual(ours, gloo)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[2])
    else:
        unittest.main()
