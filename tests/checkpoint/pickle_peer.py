"""The Python side of pt/meaning_test.cpp: `pickle_peer.py FOLDER FIRST COUNT`.

Draws one object for each of COUNT seeds, the first of which is FIRST, and saves
it with torch.save as FOLDER/SEED.pt. Then says in FOLDER/expected, in a line
`SEED DESCRIPTION` for each, what torch.load makes of it; meaning_test.cpp
describes in the same words what Lockstep makes of it.
"""
import argparse
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import struct
import sys
import types
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")  # of ComplexHalf and of quantized tensors

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex32, torch.complex64, torch.complex128, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]


class Color(enum.Enum):
    RED = 1


class Text(str):
    pass


class Items(dict):
    pass


class Subclass(torch.Tensor):
    pass


class Plain:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class WithArguments:
    """Is made by __new__ with keyword arguments (NEWOBJ_EX)."""

    def __new__(cls, *, value):
        made = super().__new__(cls)
        made.value = value
        return made

    def __getnewargs_ex__(self):
        return (), {"value": self.value}


Point = collections.namedtuple("Point", "x y")


class Drawer:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.tensors = []
        self.values = []

    def base(self):
        dtype = self.r.choice(DTYPES)
        shape = [self.r.randint(0, 4) if self.r.random() < 0.1
                 else self.r.randint(1, 4) for _ in range(self.r.randint(0, 3))]
        count = int(np.prod(shape, dtype=np.int64))
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=self.torch).bool()
        raw = torch.randint(0, 256, (count * dtype.itemsize,),
                            dtype=torch.uint8, generator=self.torch)
        return raw.view(dtype).reshape(shape)

    def view(self, tensor):
        """Another tensor over the same storage, if it can be saved with it."""
        kind = self.r.choice(
            ["transpose", "slice", "expand", "squeeze", "strided", "conj",
             "neg", "imag", "flat", "detach", "same"])
        if kind == "transpose" and tensor.dim() > 1:
            return tensor.transpose(0, tensor.dim() - 1)
        if kind == "slice" and tensor.dim() > 0:
            return tensor[self.r.randint(0, 2)::self.r.randint(1, 2)]
        if kind == "expand":
            return tensor.unsqueeze(0).expand(self.r.randint(0, 3),
                                              *tensor.shape)
        if kind == "squeeze":
            return tensor.unsqueeze(self.r.randint(0, tensor.dim()))
        if kind == "strided" and tensor.dim() == 1 and tensor.numel() > 2:
            return tensor.as_strided((tensor.numel() - 2, 2),
                                     (tensor.stride(0), tensor.stride(0)))
        if kind == "conj" and tensor.is_complex():
            return tensor.conj()
        if kind == "neg" and tensor.dtype in (torch.float32, torch.complex64,
                                              torch.int64, torch.bfloat16):
            return torch._neg_view(tensor)
        if kind == "imag" and tensor.is_complex():
            return tensor.conj().imag  # has the bit of a negative
        if kind == "flat" and tensor.is_contiguous():
            return tensor.view(-1)
        if kind == "detach":
            return tensor.detach()
        return tensor

    def tensor(self):
        if self.tensors and self.r.random() < 0.4:
            tensor = self.r.choice(self.tensors)
        else:
            tensor = self.base()
        for _ in range(self.r.randint(0, 3)):
            tensor = self.view(tensor)
        self.tensors.append(tensor)
        can_require = tensor.is_floating_point() or tensor.is_complex()
        kind = self.r.choice(["plain"] * 6 + [
            "requires", "parameter", "parameter with attribute", "buffer",
            "attribute", "subclass", "sparse", "quantized", "meta"])
        if kind == "requires" and can_require:
            return tensor.detach().requires_grad_()
        if kind.startswith("parameter"):
            made = torch.nn.Parameter(tensor.detach(), requires_grad=can_require
                                      and self.r.random() < 0.5)
            if "attribute" in kind:
                made.note = self.value(2)
            return made
        if kind == "buffer":
            return torch.nn.Buffer(tensor.detach())
        if kind == "attribute":
            made = tensor.detach()
            made.note = self.value(2)
            return made
        if kind == "subclass":
            return tensor.detach().as_subclass(Subclass)
        if kind == "sparse":
            return torch.eye(3).to_sparse()
        if kind == "quantized":
            return torch.quantize_per_tensor(torch.ones(3), 0.1, 2,
                                             torch.quint8)
        if kind == "meta":
            return torch.empty(3, 4, device="meta")
        return tensor

    def scalar(self):
        r = self.r
        return r.choice([
            lambda: None, lambda: True, lambda: False,
            lambda: r.randint(-300, 300), lambda: r.randint(-2**31, 2**31),
            lambda: r.randint(-2**63, 2**63 - 1),
            lambda: r.choice([2**63, -2**63, 2**64, -2**63 - 1, 2**600,
                              -2**3000]),
            lambda: r.uniform(-1, 1),
            lambda: r.choice([float("inf"), float("nan"), -0.0, 1e-310]),
            lambda: r.choice(["", "a", "müll", "\ud800", "x" * 300, "0"]),
        ])()

    def strange(self):
        r = self.r
        value = self.value(3)
        return r.choice([
            lambda: b"bytes", lambda: b"", lambda: b"\xff" * 300,
            lambda: bytearray(b"array"), lambda: {1, 2, "a"}, lambda: set(),
            lambda: frozenset({3}), lambda: 1 + 2j, lambda: range(3, 9),
            lambda: slice(1, 2), lambda: Ellipsis, lambda: NotImplemented,
            lambda: decimal.Decimal("1.5"), lambda: fractions.Fraction(1, 3),
            lambda: datetime.datetime(2020, 1, 2),
            lambda: pathlib.PurePosixPath("/a/b"),
            lambda: argparse.Namespace(lr=0.1, value=value),
            lambda: types.SimpleNamespace(value=value),
            lambda: collections.defaultdict(list, {"a": value}),
            lambda: collections.deque([value, 2]),
            lambda: Color.RED, lambda: Text("text"), lambda: Items(a=value),
            lambda: Plain(value), lambda: Slotted(value),
            lambda: WithArguments(value=value), lambda: Point(1, value),
            lambda: np.float64(1.5), lambda: np.int64(3),
            lambda: np.float32(2), lambda: np.bool_(True),
            lambda: np.arange(4.0), lambda: np.array(["a"]),
            lambda: np.str_("text"), lambda: np.dtype("f4"),
            lambda: torch.float32, lambda: torch.float8_e5m2,
            lambda: torch.bits8, lambda: torch.device("cpu"),
            lambda: torch.strided,
            lambda: torch.ones(2).storage(),
            lambda: torch.ones(2).untyped_storage(), lambda: print,
            lambda: torch.relu, lambda: dict, lambda: torch.Tensor,
            lambda: torch.nn.Linear(2, 2), lambda: ValueError("no"),
            lambda: torch.finfo,
        ])()

    def key(self):
        r = self.r
        return r.choice([
            lambda: r.choice("abcdefgh"), lambda: r.choice("abcdefgh"),
            lambda: r.randint(2, 2000), lambda: 0.5, lambda: None,
            lambda: (1, "a"), lambda: b"k", lambda: 2**70,
        ])()

    def items(self, depth):
        return {self.key(): self.value(depth + 1)
                for _ in range(self.r.randint(0, 4))}

    def value(self, depth=0):
        r = self.r
        if self.values and r.random() < 0.08:
            return r.choice(self.values)
        kinds = ["scalar", "tensor", "tensor", "strange"]
        if depth < 4:
            kinds += ["list", "tuple", "dict", "ordered", "counter", "size",
                      "dict"]
        kind = r.choice(kinds) if depth > 0 else "dict"
        if kind == "list":
            made = [self.value(depth + 1) for _ in range(r.randint(0, 4))]
        elif kind == "tuple":
            made = tuple(self.value(depth + 1) for _ in range(r.randint(0, 4)))
        elif kind == "dict":
            made = self.items(depth)
        elif kind == "ordered":
            made = collections.OrderedDict(self.items(depth))
            if r.random() < 0.3:
                made._metadata = {"": {"version": 1}}
        elif kind == "counter":
            made = collections.Counter({r.randint(0, 9): r.randint(1, 3)
                                        for _ in range(r.randint(0, 3))})
        elif kind == "size":
            made = torch.Size([2, 3])
        else:
            made = getattr(self, kind)()
        self.values.append(made)
        return made


class Describer:
    def __init__(self):
        self.storages = {}

    def tensor(self, tensor):
        name = str(tensor.dtype).removeprefix("torch.")
        storage = tensor.untyped_storage()
        number = ("-" if storage.nbytes() == 0 else self.storages.setdefault(
            storage._cdata, len(self.storages)))
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        flat.copy_(tensor.detach().reshape(-1))
        raw = flat.view(torch.uint8).numpy().tobytes().hex()
        return (f"{name} {list(tensor.shape)} {list(tensor.stride())} "
                f"{tensor.storage_offset()} {number} {raw}")

    def of(self, value):
        kind = type(value)
        if value is None or kind is bool:
            return str(value)
        if kind is int:
            return f"i{value}" if -2**63 <= value < 2**63 else "opaque"
        if kind is float:
            return "f" + struct.pack(">d", value).hex()
        if kind is str:
            return "s" + value.encode("utf-8", "surrogatepass").hex()
        if kind is list:
            return "[" + ",".join(map(self.of, value)) + "]"
        if kind in (tuple, torch.Size):
            return "(" + ",".join(map(self.of, value)) + ")"
        prefix = {dict: "", collections.OrderedDict: "O",
                  collections.Counter: "C"}.get(kind)
        if prefix is not None:
            return prefix + "{" + ",".join(
                self.of(key) + ":" + self.of(item)
                for key, item in value.items()) + "}"
        if (kind in (torch.Tensor, torch.nn.Parameter)
                and value.layout == torch.strided and not value.is_quantized
                and not value.is_meta and value.dtype in DTYPES):
            return self.tensor(value)
        return "opaque"


def main():
    folder, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(f"{folder}/expected", "w") as expected:
        for seed in range(first, first + count):
            path = f"{folder}/{seed}.pt"
            drawer = Drawer(seed)
            value = drawer.value()
            try:
                torch.save(value, path,
                           pickle_protocol=drawer.r.randint(2, 5))
                loaded = torch.load(path, weights_only=False)
            except RuntimeError as error:
                # Two dtypes over one storage cannot be saved, and a tensor of a
                # new dtype that requires gradients cannot be loaded.
                assert ("view the same data" in str(error)
                        or "requires grad" in str(error)), (seed, error)
                continue
            print(seed, Describer().of(loaded), file=expected)


main()
