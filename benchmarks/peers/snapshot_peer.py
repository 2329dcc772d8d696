"""The peers of `./dev bench snapshot`: torch.save, torch.load, and PyTorch's
distributed checkpoint (DCP).

    snapshot_peer.py --do torch_save --folder /dev/shm/here --bytes 1073741824
    torchrun --standalone --nproc-per-node=2 snapshot_peer.py --do dcp_save ...

Saves or loads the same model as benchmarks/snapshot.cpp. Prints one line of
JSON (docs/internals/benchmarks.md).
"""

import argparse
import json
import os
import pathlib
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

LARGE, MEDIUM, SMALL, SMALL_ELEMENTS = 6, 64, 256, 1024


class Model(torch.nn.Module):
    """Parameter i is filled with i + 1."""

    def __init__(self, size, tensors):
        super().__init__()
        floats = size // 4
        medium = (floats // 4 - SMALL * SMALL_ELEMENTS) // MEDIUM
        kinds = [("large", LARGE, floats // 8), ("medium", MEDIUM, medium),
                 ("small", SMALL, SMALL_ELEMENTS)]
        if tensors:
            kinds = [("equal", tensors, floats // tensors)]
        for kind, count, elements in kinds:
            for i in range(count):
                self.register_parameter(
                    f"{kind}{i}", torch.nn.Parameter(torch.empty(elements)))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.fill_(i + 1)

    def size(self):
        return sum(p.nbytes for p in self.parameters())

    def clear(self):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def check(self):
        for i, p in enumerate(self.parameters()):
            if p[0].item() != i + 1 or p[-1].item() != i + 1:
                raise RuntimeError("a parameter has not the value that was "
                                   "saved")


def status_bytes(name):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def meet():
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds):
    """Returns the seconds of the slowest process."""
    if not dist.is_initialized():
        return seconds
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def timed(work):
    meet()
    begin = time.perf_counter()
    work()
    return slowest(time.perf_counter() - begin)


def remove(path):
    if is_first():
        shutil.rmtree(path, ignore_errors=True)
        pathlib.Path(path).unlink(missing_ok=True)
    meet()


def repeated_save(args, path, save):
    """Saves once without and then --repeats times with a clock."""
    seconds = []
    for i in range(args.repeats + 1):
        remove(path)
        one = timed(save)
        if i > 0:
            seconds.append(one)
    remove(path)
    return {"seconds": seconds}


def torch_load(args, model, path):
    def load():
        model.load_state_dict(torch.load(path, weights_only=True))

    seconds = []
    for i in range(args.repeats + 1):
        model.clear()
        one = timed(load)
        model.check()
        if i > 0:
            seconds.append(one)
    return {"seconds": seconds}


def dcp_load(args, model, path):
    seconds = []
    for i in range(args.repeats + 1):
        model.clear()
        state = model.state_dict()
        one = timed(lambda: dcp.load(state, checkpoint_id=path))
        model.check()
        if i > 0:
            seconds.append(one)
    return {"seconds": seconds}


def dcp_async(args, model, path):
    """How long the call blocks, and how long until the snapshot is there."""
    seconds, stalls = [], []
    for i in range(args.repeats + 1):
        remove(path)
        meet()
        begin = time.perf_counter()
        future = dcp.async_save(model.state_dict(), checkpoint_id=path)
        stall = slowest(time.perf_counter() - begin)
        future.result()
        done = slowest(time.perf_counter() - begin)
        if i > 0:
            stalls.append(stall)
            seconds.append(done)
    remove(path)
    return {"seconds": seconds, "stall_seconds": stalls}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--do", required=True, choices=[
        "prepare", "prepare_dcp", "torch_save", "torch_load", "dcp_save",
        "dcp_load", "dcp_save_safetensors", "dcp_async"])
    parser.add_argument("--folder", required=True, help="where; exists")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=0)
    args = parser.parse_args()
    what = args.do
    rss_before = status_bytes("VmRSS")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    model = Model(args.bytes, args.tensors)
    path = f"{args.folder}/saved.pt"
    folder = f"{args.folder}/saved_by_dcp"
    figures = {"seconds": []}
    if what == "prepare":
        torch.save(model.state_dict(), path)
    elif what == "prepare_dcp":
        dcp.save(model.state_dict(), checkpoint_id=folder)
    elif what == "dcp_load":
        figures = dcp_load(args, model, folder)
    elif what == "torch_save":
        other = f"{args.folder}/other.pt"
        figures = repeated_save(args, other,
                                lambda: torch.save(model.state_dict(), other))
    elif what == "torch_load":
        figures = torch_load(args, model, path)
        figures["peak_bytes"] = status_bytes("VmHWM") - rss_before
    elif what == "dcp_save":
        figures = repeated_save(
            args, folder,
            lambda: dcp.save(model.state_dict(), checkpoint_id=folder))
    elif what == "dcp_save_safetensors":
        figures = repeated_save(
            args, folder,
            lambda: dcp.save(
                model.state_dict(),
                storage_writer=dcp.HuggingFaceStorageWriter(
                    folder, save_distributed=True)))
    else:
        figures = dcp_async(args, model, folder)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if is_first():
        print(json.dumps({"do": what, "ranks": ranks, "bytes": model.size(),
                          **figures}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
