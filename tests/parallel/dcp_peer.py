"""The Python side of dcp_interop_test.cpp: `dcp_peer.py WHAT FOLDER`.

save:  two ranks train with FSDP and save with PyTorch's distributed checkpoint,
       in safetensors, for C++ to read; then they train on.
check: reads what C++ saved, whole and on two ranks, and trains on.
"""
import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

FOLDER = sys.argv[2]
RANKS = 2


def build():
    model = nn.Sequential(nn.Linear(8, 1027), nn.Tanh(), nn.Linear(1027, 9))
    model = model.double()
    # The same numbers in every process; dcp_interop_test.cpp has them, too.
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((numbers / 7).sin().view_as(parameter) / 10)
    return model


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1,
                             amsgrad=True)


def train(model, optimizer, steps):
    for step in steps:
        data = torch.linspace(-1, 1 + step / 8, 32,
                              dtype=torch.float64).view(4, 8)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def tensors_of(state):
    """Numbers as tensors, because safetensors holds nothing else."""
    return {key: value if isinstance(value, torch.Tensor)
            else torch.tensor(value, dtype=torch.float64)
            for key, value in state.items() if value is not None}


def various():
    """Tensors of several dtypes and shapes, the same in C++."""
    return {
        "bfloat16": torch.arange(35).view(5, 7).bfloat16(),
        "float16": torch.arange(24).view(2, 3, 4).half(),
        "int64": torch.arange(5),
        "uint8": torch.arange(9).view(3, 3).byte(),
        "bool": torch.arange(12).view(4, 3) % 2 == 0,
        "row": torch.arange(3.0).view(1, 3),  # the second rank has no part
        "scalar": torch.tensor(2.5),
    }


def on_ranks(function):
    context = multiprocessing.get_context("fork")

    def run(rank):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{FOLDER}/store-{function.__name__}",
            rank=rank, world_size=RANKS)
        function(init_device_mesh("cpu", (RANKS,)))
        dist.destroy_process_group()
        os._exit(0)  # Gloo's threads outlive the interpreter now and then

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0, function.__name__


def save_fsdp(mesh):
    model = build()
    fully_shard(model, mesh=mesh)
    optimizer = make(model)
    train(model, optimizer, range(5))
    optim = get_optimizer_state_dict(
        model, optimizer,
        options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": get_model_state_dict(model),
              "optimizer": tensors_of(optim)},
             storage_writer=HuggingFaceStorageWriter(f"{FOLDER}/python",
                                                     save_distributed=True))
    dcp.save(get_model_state_dict(model),
             storage_writer=HuggingFaceStorageWriter(f"{FOLDER}/bare",
                                                     save_distributed=True))
    train(model, optimizer, range(5, 10))
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True,
                                        cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, f"{FOLDER}/python-end.pt")


def save_groups(mesh):
    """Two groups, of which one has no weight decay."""
    model = build()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() == 2]},
         {"params": [p for p in model.parameters() if p.dim() == 1],
          "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(2))
    optim = get_optimizer_state_dict(
        model, optimizer,
        options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": get_model_state_dict(model),
              "optimizer": tensors_of(optim)},
             storage_writer=HuggingFaceStorageWriter(f"{FOLDER}/groups",
                                                     save_distributed=True))


def save_various(mesh):
    tensors = {}
    for name, tensor in various().items():
        for dim in range(tensor.dim()):
            tensors[f"{name}.{dim}"] = distribute_tensor(tensor, mesh,
                                                         [Shard(dim)])
        tensors[name] = distribute_tensor(tensor, mesh, [Replicate()])
        tensors[f"{name}.plain"] = tensor.clone()
    dcp.save(tensors,
             storage_writer=HuggingFaceStorageWriter(f"{FOLDER}/various",
                                                     save_distributed=True))


def save():
    on_ranks(save_fsdp)
    on_ranks(save_groups)
    on_ranks(save_various)
    # One process: files with an index, and consolidated ones.
    model = build()
    names = {name: 1 + i % 2 for i, name in enumerate(model.state_dict())}
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(
        f"{FOLDER}/index", fqn_to_index_mapping=names))
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(
        f"{FOLDER}/consolidated", save_distributed=True,
        enable_consolidation=True))


def load_whole(folder):
    """The steps of docs/snapshot-folders.md."""
    model = build()
    optimizer = make(model)
    optim = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(),
             "optimizer": {"state": optim["state"]}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    with open(f"{folder}/manifest.json") as file:
        manifest = json.load(file)
    optim["param_groups"] = manifest["optimizer"]["param_groups"]
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, optim)
    return model, optimizer, manifest


def check_whole():
    for name in ("zero", "plain", "layouts"):
        folder = f"{FOLDER}/cpp-{name}/latest"
        model, optimizer, manifest = load_whole(folder)
        assert manifest["step"] == 5 and manifest["epochs_run"] == 3
        assert manifest["sampler_state"] == {"epoch": 4}
        group = optimizer.param_groups[0]
        assert group["lr"] == 0.02 and group["amsgrad"] is True
        assert group["weight_decay"] == 0.1
        for state in optimizer.state.values():
            assert state["step"] == 5
        train(model, optimizer, range(5, 10))
        # As if Python had trained alone.
        alone = build()
        other = make(alone)
        other.param_groups[0]["lr"] = 0.02
        train(alone, other, range(10))
        end = torch.load(f"{FOLDER}/cpp-{name}-end.pt", weights_only=True)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, end[key], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(value, alone.state_dict()[key],
                                       rtol=1e-12, atol=1e-12)


def check_sharded(mesh):
    expected, _, _ = load_whole(f"{FOLDER}/cpp-zero/latest")
    reader = HuggingFaceStorageReader(f"{FOLDER}/cpp-zero/latest")
    for dim in (0, 1):
        state = {}
        for name, tensor in expected.state_dict().items():
            shard = Shard(min(dim, tensor.dim() - 1))
            state[name] = distribute_tensor(torch.zeros_like(tensor), mesh,
                                            [shard])
        moments = {name: {"exp_avg": distribute_tensor(
            torch.zeros_like(tensor), mesh, [Shard(0)])}
            for name, tensor in expected.state_dict().items()}
        dcp.load({"model": state, "optimizer": {"state": moments}},
                 storage_reader=reader)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name].full_tensor(), tensor), name
            whole = moments[name]["exp_avg"].full_tensor()
            saved = torch.load(f"{FOLDER}/cpp-zero-moments.pt",
                               weights_only=True)[name]
            assert torch.equal(whole, saved), name


def check_various():
    state = {name: torch.zeros_like(tensor)
             for name, tensor in various().items()}
    dcp.load({"model": state},
             storage_reader=HuggingFaceStorageReader(f"{FOLDER}/cpp-various"))
    for name, tensor in various().items():
        assert torch.equal(state[name], tensor), name


def check_consolidated():
    """Our parts fit together for PyTorch's consolidation, too."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )
    from safetensors.torch import load_file

    names = [f"model.{name}" for name in build().state_dict()]
    os.mkdir(f"{FOLDER}/whole")
    consolidate_safetensors_files(
        f"{FOLDER}/cpp-zero/latest", f"{FOLDER}/whole",
        {name: 1 for name in names})
    whole = load_file(f"{FOLDER}/whole/model-00001-of-00001.safetensors")
    expected, _, _ = load_whole(f"{FOLDER}/cpp-zero/latest")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(whole[f"model.{name}"], tensor), name


def check():
    check_whole()
    check_various()
    check_consolidated()
    on_ranks(check_sharded)


{"save": save, "check": check}[sys.argv[1]]()
