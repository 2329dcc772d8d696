"""Python's optimizers on made-up gradients, for fused_parity_test.cpp.

    fused_peer.py FOLDER

Writes, for each case below and each of four dtypes, FOLDER/CASE_DTYPE.bin: the
parameters after 20 steps, one behind the other, as they lie in memory in
little-endian float64. Numbers are small fractions, so that both sides make the
same ones exactly.
"""

import pathlib
import sys

import torch

SIZES = [(37, 5), (3,), (), (5000,)]
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CASES = {
    "sgd": (torch.optim.SGD, {}),
    "sgd_decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "sgd_momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "maximize": True},
    ),
    "sgd_nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "adam": (torch.optim.Adam, {}),
    "adam_amsgrad": (
        torch.optim.Adam,
        {
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "amsgrad": True,
        },
    ),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_maximize": (
        torch.optim.AdamW,
        {"lr": 0.02, "amsgrad": True, "maximize": True},
    ),
}


def initial(index, size, dtype):
    count = torch.Size(size).numel()
    numbers = (torch.arange(count) * 5 + index) % 23 - 11
    return (numbers / 8.0).to(dtype).view(size)


def gradient(index, step, size, dtype):
    count = torch.Size(size).numel()
    numbers = (torch.arange(count) * 7 + step * 13 + index) % 17 - 8
    return (numbers / 16.0).to(dtype).view(size)


def main():
    folder = pathlib.Path(sys.argv[1])
    for case, (kind, options) in CASES.items():
        for name, dtype in DTYPES.items():
            parameters = [
                torch.nn.Parameter(initial(i, size, dtype))
                for i, size in enumerate(SIZES)
            ]
            # Fused, SGD leaves most elements of half-precision parameters as
            # they are (torch 2.13); ours does not use that kernel for them.
            fused = kind is not torch.optim.SGD or dtype.itemsize > 2
            optimizer = kind(parameters, fused=fused, **options)
            for step in range(20):
                if step == 10:
                    optimizer.param_groups[0]["lr"] /= 2
                for i, (parameter, size) in enumerate(zip(parameters, SIZES)):
                    # The second parameter has a gradient only in every other
                    # step.
                    skipped = i == 1 and step > 0 and step % 2 == 1
                    parameter.grad = (
                        None if skipped else gradient(i, step, size, dtype)
                    )
                optimizer.step()
            flat = torch.cat([p.detach().flatten() for p in parameters])
            flat.double().numpy().tofile(folder / f"{case}_{name}.bin")


if __name__ == "__main__":
    main()
