"""BatchNorm in one Python process on whole batches, for C++ ranks to compare.

    sync_batch_norm_peer.py JOBS

Each line of JOBS: dimensions (1, 2 or 3), dtype, momentum (or None), shape of
the batch (4,3,5,5), steps, file. `file`.input holds float64 numbers: weight,
bias, and for each step the batch and the factors of the loss. `file`.output
gets, for each step, the output and the gradients of batch, weight and bias;
then running mean and variance and, in eval mode, the output for the last batch.
"""

import sys
from pathlib import Path

import torch
from torch import nn

KINDS = {"1": nn.BatchNorm1d, "2": nn.BatchNorm2d, "3": nn.BatchNorm3d}


def work(dimensions, dtype, momentum, shape, steps, file):
    shape = [int(size) for size in shape.split(",")]
    flat = torch.frombuffer(bytearray(Path(file + ".input").read_bytes()),
                            dtype=torch.float64)

    def take(*sizes):
        nonlocal flat
        count = torch.Size(sizes).numel()
        taken, flat = flat[:count], flat[count:]
        return taken.view(sizes).to(getattr(torch, dtype))

    norm = KINDS[dimensions](
        shape[1], momentum=None if momentum == "None" else float(momentum),
        dtype=getattr(torch, dtype))
    with torch.no_grad():
        norm.weight.copy_(take(shape[1]))
        norm.bias.copy_(take(shape[1]))
    written = []
    for _ in range(int(steps)):
        batch = take(*shape).requires_grad_()
        factors = take(*shape)
        norm.zero_grad()
        out = norm(batch)
        (out.sin() * factors).sum().backward()
        written += [out, batch.grad, norm.weight.grad, norm.bias.grad]
    if flat.numel():
        raise ValueError(f"{file}.input: {flat.numel()} numbers too many")
    norm.eval()
    written += [norm.running_mean, norm.running_var, norm(batch)]
    numbers = torch.cat([t.detach().double().reshape(-1) for t in written])
    Path(file + ".output").write_bytes(numbers.numpy().tobytes())


def main():
    torch.set_num_threads(1)
    for job in Path(sys.argv[1]).read_text().splitlines():
        work(*job.split())


if __name__ == "__main__":
    main()
