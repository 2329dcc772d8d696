"""A training that Python and C++ ranks do together, or take over in turn; the
other half is interop_trainer.cpp, line by line.

    interop_trainer.py TOTAL_EPOCHS SNAPSHOT

In the form of the PyTorch tutorial "Fault-tolerant Distributed Training with
torchrun": goes on from SNAPSHOT, which rank 0 writes after each epoch, and
writes its last parameters to final-RANK.bin (float64, one behind the other).

CRASH_RANK and CRASH_EPOCH in the environment: that rank dies, the first time,
before it begins that epoch. Prints a line on stdout for each beginning:

    python rank 0 begins at epoch 0, restart 0
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 256
INPUTS = 20
BATCH_SIZE = 16


def ramp(size):
    numbers = torch.arange(size, dtype=torch.int64) * 37 % 1009
    return (numbers - 504).double() / 504


def make_net():
    net = nn.Sequential(nn.Linear(INPUTS, 32), nn.BatchNorm1d(32), nn.Tanh(),
                        nn.Linear(32, 1)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(ramp(parameter.numel()).view_as(parameter) / 4)
    return net


class Trainer:
    def __init__(self, snapshot):
        self.rank = int(os.environ["RANK"])
        self.restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.snapshot = snapshot
        self.first_epoch = 0
        self.net = make_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05,
                                         momentum=0.9)
        if os.path.exists(snapshot):
            self.load()
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.001)
        data = TensorDataset(ramp(SAMPLES * INPUTS).view(SAMPLES, INPUTS),
                             ramp(SAMPLES).sin().view(SAMPLES, 1))
        self.sampler = DistributedSampler(data, seed=1)
        self.loader = DataLoader(data, batch_size=BATCH_SIZE,
                                 sampler=self.sampler)

    def load(self):
        state = torch.load(self.snapshot, weights_only=True)
        self.net.load_state_dict(state["MODEL_STATE"])
        self.optimizer.load_state_dict(state["OPTIMIZER_STATE"])
        self.first_epoch = state["EPOCHS_RUN"] + 1

    def save(self, epoch):
        state = {"MODEL_STATE": self.model.module.state_dict(),
                 "OPTIMIZER_STATE": self.optimizer.state_dict(),
                 "EPOCHS_RUN": epoch}
        torch.save(state, self.snapshot + ".new")
        os.replace(self.snapshot + ".new", self.snapshot)

    def crash_if_told(self, epoch):
        if (self.restart == "0"
                and os.environ.get("CRASH_RANK") == str(self.rank)
                and os.environ["CRASH_EPOCH"] == str(epoch)):
            os.kill(os.getpid(), signal.SIGKILL)

    def train(self, epochs):
        print(f"python rank {self.rank} begins at epoch {self.first_epoch}, "
              f"restart {self.restart}", flush=True)
        for epoch in range(self.first_epoch, epochs):
            self.crash_if_told(epoch)
            self.sampler.set_epoch(epoch)
            for data, target in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(data), target).backward()
                self.optimizer.step()
            if self.rank == 0:
                self.save(epoch)
        flat = torch.cat([p.detach().reshape(-1)
                          for p in self.net.parameters()])
        Path(f"final-{self.rank}.bin").write_bytes(flat.numpy().tobytes())


def main():
    torch.set_num_threads(1)
    # Uses a device map: plain "gloo" makes a group for each device type.
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
    Trainer(sys.argv[2]).train(int(sys.argv[1]))
    dist.destroy_process_group()
    # Skips the interpreter's own shutdown: with torch 2.13 it sometimes aborts
    # ("terminate called without an active exception", 2 runs of 85) after all
    # is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
