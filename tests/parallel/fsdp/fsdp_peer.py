"""Trains a model of blocks with Python's fully_shard.

    torchrun --standalone --nproc-per-node=N fsdp_peer.py CASES

CASES is a file of JSON: a list of objects with
  name          of the file beside CASES: NAME.RANK.json, which gets the losses
                of this rank and the full parameters by their names
  dtype         of the parameters
  param_dtype, reduce_dtype   of MixedPrecisionPolicy, or ""
  reshard       reshard_after_forward
  micro         how many backward passes each step accumulates
  steps
The model, the first values and the batches are those of
fsdp_interop_test.cpp.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH = 11
TOKENS = 13


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH - 1)
        self.down = torch.nn.Linear(3 * WIDTH - 1, WIDTH)
        # FSDP2 does not divide a tensor without dimensions.
        self.gain = torch.nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        for i in range(3):
            setattr(self, f"block{i}", Block())
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i in range(3):
            x = getattr(self, f"block{i}")(x)
        return self.head(x)


def first_values(count, number):
    numbers = (torch.arange(count) * 37 + 100 * number) % 1009
    return (numbers - 504).to(torch.float64) / 1512


def tokens_of(batch, rank):
    numbers = torch.arange(20) * 7 + 5 * batch + 3 * rank
    return ((numbers * numbers) % TOKENS).view(5, 4)


def dtype_of(name):
    return getattr(torch, name) if name else None


def train(case, rank):
    net = Net().to(dtype_of(case["dtype"]))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            values = first_values(parameter.numel(), number)
            parameter.copy_(values.view_as(parameter))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(case["param_dtype"]),
        reduce_dtype=dtype_of(case["reduce_dtype"]))
    for i in range(3):
        fully_shard(getattr(net, f"block{i}"), mp_policy=policy,
                    reshard_after_forward=case["reshard"])
    fully_shard(net, mp_policy=policy, reshard_after_forward=case["reshard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(case["steps"]):
        optimizer.zero_grad()
        for micro in range(case["micro"]):
            net.set_requires_gradient_sync(micro == case["micro"] - 1)
            tokens = tokens_of(step * case["micro"] + micro, rank)
            logits = net(tokens).reshape(-1, TOKENS).to(torch.float64)
            loss = F.cross_entropy(logits, tokens.reshape(-1))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    values = {name: parameter.full_tensor().double().flatten().tolist()
              for name, parameter in net.named_parameters()}
    return {"losses": losses, "parameters": values}


def main():
    dist.init_process_group("gloo")
    path = Path(sys.argv[1])
    for case in json.loads(path.read_text()):
        result = train(case, dist.get_rank())
        out = path.parent / f"{case['name']}.{dist.get_rank()}.json"
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


main()
