"""The peer of the healing in `./dev bench launch`: torchft's fault tolerance for
one training step, two replica groups of one rank each, on Gloo.

    torchft_peer.py lighthouse FOLDER   torchft's server: writes its address to
                                        FOLDER/lighthouse
    torchft_peer.py REPLICA FOLDER      replica group 0 or 1: trains without end

Trains the same model with the same optimizer as benchmarks/healing.cpp, on one
thread. Each replica writes FOLDER/REPLICA-PID: for each step that it has
committed a line with the step's number, the steady clock in ns, and the number
of replica groups that took part. Needs torchft 0.2.0.

`DistributedDataParallel` of torchft 0.2.0 ends the replica that survives, so this
uses its `PureDistributedDataParallel`. That one starts an all-reduce for each
gradient and waits for none, so the replicas would train different models; the
manager here remembers the operations, and the training waits for them.
"""

import datetime
import os
import pathlib
import sys
import time

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.ddp import PureDistributedDataParallel

HOST = "127.0.0.1"
ALLOWED = datetime.timedelta(seconds=30)
# A replica group is taken for dead when nothing was heard from it for so long
# (it sends a heartbeat every 100 ms; the default is 5000), and the lighthouse
# looks so often (100).
HEARTBEAT_TIMEOUT_MS = 1000
TICK_MS = 20


class WaitedManager(torchft.Manager):
    """A manager that can wait for all its all-reduces."""

    def __init__(self, **options):
        self.begun = []
        super().__init__(**options)

    def allreduce(self, *arguments, **options):
        work = super().allreduce(*arguments, **options)
        self.begun.append(work)
        return work

    def wait_all(self):
        for work in self.begun:
            work.wait()
        self.begun.clear()


def write_whole(path, text):
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def serve(folder):
    server = LighthouseServer(bind=f"{HOST}:0", min_replicas=1,
                              join_timeout_ms=10_000, quorum_tick_ms=TICK_MS,
                              heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS)
    write_whole(folder / "lighthouse", server.address())
    while True:
        time.sleep(60)


def train(replica, folder):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 2048), nn.ReLU(), nn.Linear(2048, 2048),
                          nn.ReLU(), nn.Linear(2048, 1))
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = WaitedManager(
        pg=torchft.ProcessGroupGloo(timeout=ALLOWED), min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(),
                            "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"])),
        replica_id=f"replica_{replica}", rank=0, world_size=1,
        store_addr=HOST, store_port=store.port, hostname=HOST, timeout=ALLOWED,
        lighthouse_addr=(folder / "lighthouse").read_text())
    wrapped = PureDistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(
        manager, torch.optim.AdamW(model.parameters(), fused=True))
    torch.manual_seed(2 + replica)
    data, target = torch.randn(32, 20), torch.randn(32, 1)
    with open(folder / f"{replica}-{os.getpid()}", "w", buffering=1) as steps:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(data), target).backward()
            manager.wait_all()
            optimizer.step()
            if manager.current_step() > before:
                steps.write(f"{manager.current_step()} {time.monotonic_ns()} "
                            f"{manager.num_participants()}\n")


def main():
    what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if what == "lighthouse":
        serve(folder)
    else:
        train(int(what), folder)


if __name__ == "__main__":
    main()
