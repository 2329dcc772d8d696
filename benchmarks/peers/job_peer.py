"""A whole job in Python, for `./dev bench` to time from launch to exit.

    torchrun --standalone --nproc-per-node=2 job_peer.py 50 10

The work of the program multigpu_torchrun.py in PyTorch's tutorial series
"Distributed Data Parallel in PyTorch", on CPUs over Gloo: 2,048 samples of 20
random features, one linear layer, SGD, cross entropy, a snapshot now and then,
from which it resumes if there is one. Snapshots have the tutorial's keys,
MODEL_STATE and EPOCHS_RUN, and go to --snapshot (delete it before timing).
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 2048
FEATURES = 20


def load(path, model):
    """Restores `model`. Returns the epoch to begin with."""
    if not os.path.exists(path):
        return 0
    print("Loading snapshot")
    snapshot = torch.load(path, weights_only=True)
    model.load_state_dict(snapshot["MODEL_STATE"])
    first = snapshot["EPOCHS_RUN"] + 1
    print(f"Resuming training from snapshot at Epoch {first}")
    return first


def save(path, model, epoch):
    torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": epoch}, path)
    print(f"Epoch {epoch} | Training snapshot saved at {path}")


def train(args):
    rank = int(os.environ["LOCAL_RANK"])
    # A list can be a dataset, and is the cheapest one for Python's loader to
    # collate.
    dataset = [(torch.rand(FEATURES), torch.rand(1)) for _ in range(SAMPLES)]
    loader = DataLoader(dataset, batch_size=args.batch_size,
                        sampler=DistributedSampler(dataset))
    plain = nn.Linear(FEATURES, 1)
    first = load(args.snapshot, plain)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    for epoch in range(first, args.total_epochs):
        print(f"[CPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} "
              f"| Steps: {len(loader)}")
        loader.sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
        if rank == 0 and epoch % args.save_every == 0:
            save(args.snapshot, plain, epoch)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", type=int, nargs="?", default=50)
    parser.add_argument("save_every", type=int, nargs="?", default=10)
    parser.add_argument("--batch_size", type=int, default=32,
                        help="samples on each rank")
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


if __name__ == "__main__":
    main()
