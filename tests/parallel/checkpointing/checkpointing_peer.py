"""torch.utils.checkpoint in one Python process, for C++ to compare.

    checkpointing_peer.py JOBS

Each line of JOBS: dropout, autocast (0 or 1), file. The file gets float64
numbers: for each of two steps the loss and the gradients of the input and of all
parameters; then how often each block was called, and three random numbers.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH = 3, 6


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.rate = rate
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = torch.dropout(self.inner(x).tanh(), self.rate, True)
        return x + self.outer(hidden)


@torch.no_grad()
def fill(tensors):
    start = 0.1
    for tensor in tensors:
        count = torch.arange(tensor.numel(), dtype=torch.float64)
        wave = torch.sin(count * 0.7 + start) * 0.4
        tensor.copy_(wave.view(tensor.shape))
        start += 0.3


def work(dropout, autocast, file):
    dtype = torch.float32 if autocast else torch.float64
    blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS)).to(dtype)
    given = torch.empty(5, WIDTH, dtype=dtype)
    fill([given])
    fill(blocks.parameters())
    numbers = []
    torch.manual_seed(21)
    for _ in range(2):
        blocks.zero_grad()
        x = given.clone().requires_grad_()
        y = x
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False)
        loss = y.square().sum()
        loss.backward()
        numbers += [loss, x.grad, *(p.grad for p in blocks.parameters())]
    numbers += [torch.tensor(float(block.calls)) for block in blocks]
    numbers.append(torch.rand(3))
    flat = torch.cat([t.detach().double().reshape(-1) for t in numbers])
    Path(file).write_bytes(flat.numpy().tobytes())


def main():
    torch.set_num_threads(1)
    for job in Path(sys.argv[1]).read_text().splitlines():
        dropout, autocast, file = job.split()
        work(float(dropout), autocast == "1", file)


if __name__ == "__main__":
    main()
