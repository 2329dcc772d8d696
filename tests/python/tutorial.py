"""What the programs of PyTorch's tutorial series "Distributed Data Parallel in
PyTorch" do, on CPUs and on the backend that is named.

    tutorial.py PROGRAM EPOCHS SAVE_EVERY --backend NAME --snapshot FILE

PROGRAM has the tutorial's name: single_gpu (one process), multigpu (starts two
ranks by itself), multigpu_torchrun and multinode (started by a launcher; they go
on from the snapshot, if there is one). With --kill-at, rank 1 kills itself before
that epoch, in the first attempt. At the end rank 0 prints the epoch with which it
began, and a digest of the parameters.
"""

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPAWNED = 2


class Trainer:
    def __init__(self, args, rank, distributed):
        self.args = args
        self.rank = rank
        torch.manual_seed(0)
        inputs = torch.randn(256, 20)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.sampler = DistributedSampler(dataset) if distributed else None
        self.loader = DataLoader(dataset, batch_size=16, sampler=self.sampler)
        self.plain = nn.Linear(20, 1)
        self.first = self.load()
        self.model = (DistributedDataParallel(self.plain) if distributed
                      else self.plain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def load(self):
        if not os.path.exists(self.args.snapshot):
            return 0
        snapshot = torch.load(self.args.snapshot, weights_only=True)
        self.plain.load_state_dict(snapshot["model"])
        return snapshot["epochs"]

    def save(self, epochs):
        # A rank that is killed meanwhile leaves the previous snapshot.
        written = self.args.snapshot + ".new"
        torch.save({"model": self.plain.state_dict(), "epochs": epochs}, written)
        os.replace(written, self.args.snapshot)

    def train(self):
        for epoch in range(self.first, self.args.epochs):
            if (epoch == self.args.kill_at and self.rank == 1
                    and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.sampler:
                self.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()
            if self.rank == 0 and (epoch + 1) % self.args.save_every == 0:
                self.save(epoch + 1)
        if self.rank == 0:
            digest = hashlib.sha256(b"".join(
                p.detach().numpy().tobytes() for p in self.plain.parameters()))
            print("began with", self.first, "digest", digest.hexdigest()[:16],
                  flush=True)


def spawned(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(args.backend, rank=rank, world_size=SPAWNED)
    Trainer(args, rank, distributed=True).train()
    dist.destroy_process_group()
    if args.backend == "gloo":
        os._exit(0)  # Gloo's threads outlive the interpreter now and then


def launched(args):
    dist.init_process_group(args.backend)
    Trainer(args, dist.get_rank(), distributed=True).train()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=("single_gpu", "multigpu",
                                            "multigpu_torchrun", "multinode"))
    parser.add_argument("epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--port", type=int, help="for multigpu")
    args = parser.parse_args()
    if args.program == "single_gpu":
        Trainer(args, 0, distributed=False).train()
    elif args.program == "multigpu":
        torch.multiprocessing.spawn(spawned, (args, args.port), SPAWNED)
    else:
        launched(args)


if __name__ == "__main__":
    main()
