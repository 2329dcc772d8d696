"""Python's optimizers on made-up gradients, for fused_parity_test.cpp.

    fused_peer.py FOLDER

Writes, for each case below and each of six dtypes, FOLDER/CASE_DTYPE.bin: the
parameters after 20 steps, one after the other, as they lie in memory in
little-endian float64. Numbers are small fractions, so that both sides make the
same ones exactly. FOLDER/groups.json has the options of all parameter groups,
and the defaults, of the cases in GROUPS.
"""

import json
import pathlib
import sys

import torch

SIZES = [(37, 5), (3,), (), (5000,)]
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    # Python's fused optimizers refuse complex parameters; the others step them
    # as pairs of reals.
    "complex64": torch.complex64,
    "complex128": torch.complex128,
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
    "sgd_groups": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
    ),
    "adam_groups": (
        torch.optim.Adam,
        {
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "amsgrad": True,
        },
    ),
    "adamw_groups": (
        torch.optim.AdamW,
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ),
}
# The options that the group of each parameter gives; the last one is added
# after seven steps. Many values are the defaults of the classes.
GROUPS = {
    "sgd_groups": [
        {},
        {"weight_decay": 0},
        {"lr": 1e-3, "momentum": 0, "nesterov": False},
        {"dampening": 0.5, "nesterov": False},
    ],
    "adam_groups": [
        {},
        {"weight_decay": 0, "eps": 1e-8},
        {"lr": 1e-3, "betas": (0.9, 0.999), "amsgrad": False},
        {"weight_decay": 0, "betas": (0.9, 0.999)},
    ],
    "adamw_groups": [
        {},
        {"weight_decay": 0},
        {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01},
        {"weight_decay": 0.01, "amsgrad": True},
    ],
}


# Makes a tensor from the numbers, or from them and other imaginary parts.
def with_dtype(numbers, size, dtype):
    if dtype.is_complex:
        numbers = torch.complex(numbers.double(), 0.25 - numbers.double())
    return numbers.to(dtype).view(size)


def initial(index, size, dtype):
    count = torch.Size(size).numel()
    numbers = (torch.arange(count) * 5 + index) % 23 - 11
    return with_dtype(numbers / 8.0, size, dtype)


def gradient(index, step, size, dtype):
    count = torch.Size(size).numel()
    numbers = (torch.arange(count) * 7 + step * 13 + index) % 17 - 8
    return with_dtype(numbers / 16.0, size, dtype)


def main():
    folder = pathlib.Path(sys.argv[1])
    written = {}
    for case, (kind, options) in CASES.items():
        for name, dtype in DTYPES.items():
            parameters = [
                torch.nn.Parameter(initial(i, size, dtype))
                for i, size in enumerate(SIZES)
            ]
            # Fused, SGD leaves most elements of half-precision parameters as
            # they are (torch 2.13); ours does not use that kernel for them.
            fused = not dtype.is_complex and (
                kind is not torch.optim.SGD or dtype.itemsize > 2
            )
            groups = GROUPS.get(case)
            named = parameters
            if groups:
                named = [
                    {"params": [p], **group}
                    for p, group in zip(parameters, groups)
                ]
            optimizer = kind(
                named[:-1] if groups else named, fused=fused, **options
            )
            for step in range(20):
                if groups and step == 7:
                    optimizer.add_param_group(named[-1])
                    written[case] = [
                        {key: group[key] for key in group if key != "params"}
                        for group in optimizer.param_groups
                    ] + [optimizer.defaults]
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
            if dtype.is_complex:
                flat = torch.view_as_real(flat).flatten()
            flat.double().numpy().tofile(folder / f"{case}_{name}.bin")
    (folder / "groups.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
