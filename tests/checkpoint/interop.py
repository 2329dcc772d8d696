"""The Python side of interop_test.cpp: `interop.py WHAT FOLDER`.

write: saves what a Python program would, for C++ to read.
check: reads what C++ saved, with torch.load(weights_only=True) and with a
       safetensors reader of a dozen lines, and goes on training with it.
check-state-dict: loads a state_dict that C++ saved.
spoil-scheduler: gives a snapshot a scheduler's state that C++ does not read.
"""
import argparse
import collections
import json
import struct
import sys
import types

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

FOLDER = sys.argv[2]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9,
                                             centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16),
                          nn.Linear(16, 3))
    return model.double()


def train(model, optimizer, steps):
    for step in steps:
        data = torch.linspace(-1, 1 + step / 8, 32,
                              dtype=torch.float64).view(4, 8)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def load_safetensors(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    dtypes = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64,
              "U8": torch.uint8}
    header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(
            data[begin:end], dtype=dtypes[entry["dtype"]]
        ).view(entry["shape"])
    return tensors


class Projections(nn.Module):
    """Parameters of one shape; the same in interop_test.cpp."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2, 2)))

    def stepped(self, make):
        # The first moments tell the parameters apart.
        optimizer = make(self)
        for name, parameter in self.named_parameters():
            parameter.grad = torch.full_like(parameter, ord(name))
        optimizer.step()
        return optimizer


class Layers(nn.Module):
    """Of every kind of name; the same in interop_test.cpp."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.convolution = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False),
                                         nn.BatchNorm2d(2), nn.ReLU())
        self.memory = nn.LSTM(8, 4, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def filled(self):
        # Gives each element of every tensor a value of its own.
        with torch.no_grad():
            for i, tensor in enumerate(self.state_dict().values()):
                values = torch.arange(tensor.numel()) + 1000 * i
                tensor.copy_(values.view(tensor.shape))
        return self


def write():
    torch.save(Layers().filled().state_dict(), f"{FOLDER}/layers.pth")
    torch.manual_seed(0)
    model = build()
    # The tutorial's snapshot and its plain checkpoint.
    torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": 10},
               f"{FOLDER}/tutorial.pt")
    torch.save(model.state_dict(), f"{FOLDER}/checkpoint.pt")
    torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": 10},
               f"{FOLDER}/protocol4.pt", pickle_protocol=4)
    # Files as programs save them that do not follow the tutorial.
    torch.save({"model": model.state_dict(),
                "optimizer": OPTIMIZERS["Adam"](model.parameters()).state_dict(),
                "epoch": 3, "loss": 0.25,
                "arguments": {"lr": 0.1, "name": "a", "sizes": [1, 2]}},
               f"{FOLDER}/entries.pt")
    for name, dtype in {"half": torch.float16, "bfloat16": torch.bfloat16,
                        "float": torch.float32}.items():
        weights = {key: value.to(dtype) if value.is_floating_point() else value
                   for key, value in model.state_dict().items()}
        torch.save(weights, f"{FOLDER}/{name}.pt")
        other = build()
        other.load_state_dict(weights)
        torch.save(other.state_dict(), f"{FOLDER}/converted-{name}.pt")
    write_incompatible(model.state_dict())
    base = torch.arange(24.0).view(4, 6)
    complex_base = torch.complex(torch.arange(4.0), torch.arange(1.0, 5))
    attributed = nn.Parameter(torch.ones(2))
    attributed.note = {1, 2}
    torch.save({
        "transposed": base.t(), "slice": base[1:3, ::2], "same": base,
        "expanded": torch.ones(1).expand(5),
        "parameter": nn.Parameter(torch.ones(2)),
        "half": torch.ones(2).half(), "bfloat16": torch.ones(2).bfloat16(),
        "int8": torch.ones(2).char(), "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.5),
        "conj": complex_base.conj(), "neg": complex_base.clone().conj().imag,
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "complex32": torch.ones(2, dtype=torch.complex32),
        "attributed": attributed, "buffer": nn.Buffer(torch.ones(2)),
    }, f"{FOLDER}/tensors.pt")
    for name, make in OPTIMIZERS.items():
        model = build()
        optimizer = make(model.parameters())
        train(model, optimizer, range(3))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        state = optimizer.state_dict()
        torch.save({"MODEL_STATE": before, "OPTIMIZER_STATE": state},
                   f"{FOLDER}/python-{name}.pt")
        train(model, optimizer, range(3, 6))
        torch.save(model.state_dict(), f"{FOLDER}/python-{name}-end.pt")
    for name, make in {
            "named": lambda model: torch.optim.Adam(model.named_parameters()),
            "wrapped": lambda model: torch.optim.Adam(
                [("module." + name, parameter)
                 for name, parameter in model.named_parameters()]),
            "numbered": lambda model: torch.optim.Adam(model.parameters()),
            }.items():
        model = Projections("qkv")
        optimizer = model.stepped(make)
        torch.save({"MODEL_STATE": model.state_dict(),
                    "OPTIMIZER_STATE": optimizer.state_dict()},
                   f"{FOLDER}/optimizer-{name}.pt")
    model = build()
    lbfgs = torch.optim.LBFGS(model.parameters())

    def closure():
        loss = sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    lbfgs.step(closure)
    torch.save({"MODEL_STATE": model.state_dict(),
                "OPTIMIZER_STATE": lbfgs.state_dict()}, f"{FOLDER}/lbfgs.pt")
    torch.save({"MODEL_STATE": build().state_dict(), "EPOCHS_RUN": 3,
                "arguments": argparse.Namespace(lr=0.1), "best": np.float64(1),
                "seen": {1, 2}, "raw": b"bytes", "big": 2**70, 5.5: "float",
                "model": build(), "table": np.ones(3)},
               f"{FOLDER}/strange.pt")
    try:
        from safetensors.torch import save_model
    except ImportError:
        pass
    else:
        save_model(Layers().filled(), f"{FOLDER}/layers.safetensors")
    torch.save({"MODEL_STATE": build().state_dict(), "METADATA": {"lr": 0.1},
                "SCHEDULER_STATE": {5.5: 1},
                "OPTIMIZER_STATE": {
                    "state": {"0.weight": {"step": torch.tensor(1.0)}},
                    "param_groups": [{"lr": 0.1, "params": ["0.weight"]}]}},
               f"{FOLDER}/unread.pt")
    write_options()
    torch.save({"fun": print}, f"{FOLDER}/function.pt")
    torch.save(build(), f"{FOLDER}/module.pt")


def write_options():
    """The options of every class of optimizer, and those that others add."""
    classes = [name for name, value in vars(torch.optim).items()
               if isinstance(value, type) and value is not torch.optim.Optimizer
               and issubclass(value, torch.optim.Optimizer)]
    model = nn.Sequential(nn.Linear(2, 2, bias=False))

    def save(name, optimizer):
        torch.save({"MODEL_STATE": model.state_dict(),
                    "OPTIMIZER_STATE": optimizer.state_dict()},
                   f"{FOLDER}/options-{name}.pt")

    for name in classes:
        save(name, getattr(torch.optim, name)(model.parameters(), lr=0.1))
    with open(f"{FOLDER}/classes.json", "w") as file:
        json.dump(classes, file)
    schedulers = torch.optim.lr_scheduler
    for name, make in {
            "one-cycle": lambda o: schedulers.OneCycleLR(o, 0.1, 10),
            "cyclic": lambda o: schedulers.CyclicLR(o, 0.1, 1),
            "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.1)}.items():
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        make(optimizer)
        save(name, optimizer)
    for name, option in {"lars": {"trust_coefficient": 0.001},
                         "mode": {"mode": "fast"},
                         "named": {"name": "decay"}}.items():
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer.param_groups[0].update(option)
        save(name, optimizer)


def write_incompatible(weights):
    """State dicts that do not fit, and what Python leaves out of each."""
    fewer = {key: value for key, value in weights.items()
             if key not in {"0.bias", "2.running_mean"}}
    more = {"head.weight": torch.ones(2), **weights,
            "0.scale": torch.ones(1), "2.sub.bias": torch.ones(1)}
    others = {"0.weights" if key == "0.weight" else key: value
              for key, value in weights.items()}
    extra = {**weights, "_extra_state": {"scale": 1.0}, "0._extra_state": None}
    said = {}
    for name, state in {"fewer.pt": fewer, "more.pt": more, "others.pt": others,
                        "extra.pt": extra}.items():
        torch.save(state, f"{FOLDER}/{name}")
        result = build().load_state_dict(state, strict=False)
        said[name] = {"missing": result.missing_keys,
                      "unexpected": sorted(result.unexpected_keys)}
        try:
            build().load_state_dict(state)
        except RuntimeError:
            pass
        else:
            raise AssertionError(f"{name} fits")
    with open(f"{FOLDER}/incompatible.json", "w") as file:
        json.dump(said, file)


def check():
    for name, make in OPTIMIZERS.items():
        snapshot = torch.load(f"{FOLDER}/cpp-{name}.pt", weights_only=True)
        end = torch.load(f"{FOLDER}/cpp-{name}-end.pt", weights_only=True)
        model = build()
        model.load_state_dict(snapshot["MODEL_STATE"])
        assert list(snapshot["MODEL_STATE"]) == list(model.state_dict())
        optimizer = make(model.parameters())
        keys = set(optimizer.state_dict()["param_groups"][0])
        saved = set(snapshot["OPTIMIZER_STATE"]["param_groups"][0])
        assert keys == saved, (name, keys ^ saved)
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        train(model, optimizer, range(3, 6))
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, end["MODEL_STATE"][key],
                                       rtol=1e-12, atol=1e-12)
        tensors = load_safetensors(f"{FOLDER}/cpp-{name}.safetensors")
        for key, value in snapshot["MODEL_STATE"].items():
            assert torch.equal(value, tensors[key]), key
    full = torch.load(f"{FOLDER}/full.pt", weights_only=True)
    assert full["EPOCHS_RUN"] == 10 and full["STEP"] == 1234567890123
    assert full["SAMPLER_STATE"] == {"epoch": 11, "consumed": 96, "seed": -1}
    assert full["SCHEDULER_STATE"] == {
        "T_max": 10, "eta_min": 1.0, "best": float("inf"), "flag": True,
        "mode": "min", "none": None, "base_lrs": [0.1, 0.2],
        "milestones": collections.Counter({-5: 1, 30: 2}),
        "_schedulers": [{"gamma": 0.5}, {"gamma": 0.5}]}
    milestones = full["SCHEDULER_STATE"]["milestones"]
    assert type(milestones) is collections.Counter
    assert sorted(milestones.elements()) == [-5, 30, 30]
    assert type(full["SCHEDULER_STATE"]["T_max"]) is int
    assert type(full["SCHEDULER_STATE"]["eta_min"]) is float
    assert full["METADATA"]["note"] == 'from "here", ü'
    # Where Python's PostLocalSGDOptimizer has its averager's step.
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([torch.ones(2)], lr=0.1),
                                      types.SimpleNamespace(step=0))
    own = {**optimizer.state_dict(), "step": full["OPTIMIZER_STATE"]["step"]}
    optimizer.load_state_dict(own)
    assert optimizer.averager.step == 8
    for path in f"{FOLDER}/cpp-named.pt", f"{FOLDER}/cpp-named.pth":
        named = torch.load(path, weights_only=True)["OPTIMIZER_STATE"]
        assert named["param_groups"][0]["param_names"] == ["v", "q", "k"]
        python = torch.optim.Adam(Projections("vqk").named_parameters())
        python.load_state_dict(named)
        for name, state in zip("vqk", python.state_dict()["state"].values()):
            assert abs(state["exp_avg"].mean() - 0.1 * ord(name)) < 1e-4, name
    torch.set_rng_state(full["GENERATOR_STATES"][0])
    assert torch.equal(torch.rand(3), full["MODEL_STATE"]["drawn"])
    try:
        from safetensors.torch import load_file
    except ImportError:
        print("safetensors is not installed: its own reader was not tried")
    else:
        weights = load_file(f"{FOLDER}/cpp-SGD.safetensors")
        build().load_state_dict({k: v for k, v in weights.items()
                                 if not k.startswith("lockstep.")})
        check_tied(f"{FOLDER}/cpp-layers.safetensors")


def check_tied(path):
    """A file of ours is as safetensors.torch.save_model writes it."""
    from safetensors import safe_open
    from safetensors.torch import load_model
    model = Layers()
    load_model(model, path)  # strict
    expected = Layers().filled().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with safe_open(path, "pt") as ours:
        with safe_open(f"{FOLDER}/layers.safetensors", "pt") as theirs:
            assert sorted(ours.keys()) == sorted(theirs.keys())
            for name, kept in theirs.metadata().items():
                if name != "format":
                    assert ours.metadata()[name] == kept, name


def check_state_dict():
    expected = Layers().filled().state_dict()
    saved = torch.load(f"{FOLDER}/cpp-layers.pth", weights_only=True)
    assert type(saved) is type(expected) and list(saved) == list(expected)
    model = Layers()
    print(model.load_state_dict(saved))
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == saved[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    shared = [saved[name].untyped_storage().data_ptr()
              for name in ("words.weight", "out.weight")]
    assert shared[0] == shared[1]


def spoil_scheduler():
    path = f"{FOLDER}/scheduled.pt"
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, "SCHEDULER_STATE": {5.5: 1}}, path)


{"write": write, "check": check, "spoil-scheduler": spoil_scheduler,
 "check-state-dict": check_state_dict}[sys.argv[1]]()
