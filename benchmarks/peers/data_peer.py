"""The loader of `./dev bench data` in Python: torch.utils.data.DataLoader.

    data_peer.py --workload tutorial --workers 0 --epochs 20

Loops over the same samples as benchmarks/data_loader.cpp and does nothing with
the batches. Prints one line of JSON (docs/internals/benchmarks.md).
"""

import argparse
import json
import time

import torch
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 32
TUTORIAL_SAMPLES = 2048
IMAGES = 256
STORED = 256   # pixels of a side, in memory
CROPPED = 224  # pixels of a side, in the batch


class Images(Dataset):
    """Images in memory that are cropped, flipped and normalised with the
    operators that torchvision calls for it."""

    def __init__(self):
        self.pixels = torch.randint(256, (IMAGES, 3, STORED, STORED),
                                    dtype=torch.uint8)
        self.target = torch.randint(1000, (IMAGES,))
        self.mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        self.deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        number = index * 2654435761
        top = number % (STORED - CROPPED)
        left = number // 64 % (STORED - CROPPED)
        image = self.pixels[index].narrow(1, top, CROPPED)
        image = image.narrow(2, left, CROPPED)
        if number // 4096 % 2 == 1:
            image = image.flip(2)
        image = image.to(torch.float32).div_(255)
        image = image.sub_(self.mean).div_(self.deviation)
        return image, self.target[index]


def tutorial():
    # A list, as in the tutorial; it is the cheapest for the loader to collate.
    return [(torch.rand(20), torch.rand(1)) for _ in range(TUTORIAL_SAMPLES)]


def one_epoch(loader, samples, check=None):
    """Returns the seconds of one loop."""
    begin = time.perf_counter()
    seen = 0
    for data, _ in loader:
        seen += data.size(0)
        if check is not None:
            check[0] += data.sum().item()
    seconds = time.perf_counter() - begin
    if seen != samples:
        raise RuntimeError(f"the loop saw {seen} of {samples} samples")
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=["tutorial", "images"],
                        default="tutorial")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(1)
    dataset = Images() if args.workload == "images" else tutorial()
    # Persistent, as ours are: otherwise each loop starts processes.
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True,
                        num_workers=args.workers,
                        persistent_workers=args.workers > 0)
    check = [0.0]
    one_epoch(loader, len(dataset), check)
    for _ in range(args.warmup):
        one_epoch(loader, len(dataset))
    print(json.dumps({
        "side": "python", "workload": args.workload, "workers": args.workers,
        "samples": len(dataset), "check": check[0],
        "seconds": [one_epoch(loader, len(dataset))
                    for _ in range(args.epochs)]}))


if __name__ == "__main__":
    main()
