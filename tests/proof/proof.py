"""Compares trainings that are divided over ranks with one process and with
Python.

    proof.py --build=BUILD [--quick] [--part=PART]... [--python=PYTHON]
             [--write=PAGE]

Prints the tables of docs/internals/proof.md, and writes PAGE if it is named. Ends with 1
if any row differs by more than its bound. PARTS are `process`, `snapshots`,
`python` and `traps`; the default is all of them. --quick runs some rows of each
part, in float64 alone. PYTHON has torch and safetensors; the comparisons
themselves need neither.
"""

import argparse
import array
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("process", "zoo", "snapshots", "python", "traps")
STEPS = 20

# float64: what remains is the order of sums, some 1e-14 after 20 steps. A
# mistake in the numbers is at least as large as a step of the optimizer, 1e-2.
BOUND = {"float64": 1e-10, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One division of the model, that of the program's options."""

    what: str
    options: str
    quick: bool = False
    program: str = "proof_train"

    def sizes(self):
        return {axis: self.number(axis, 1)
                for axis in ("data", "shard", "tensor", "pipeline", "context")}

    def number(self, option, default):
        for word in self.options.split():
            if word.startswith(f"--{option}="):
                return int(word.split("=")[1])
        return default

    def ranks(self):
        product = 1
        for size in self.sizes().values():
            product *= size
        return product

    def model(self):
        """The options that one process needs to train the same model."""
        names = ("--tied", "--non-causal", "--blocks", "--length", "--batch")
        return " ".join(word for word in self.options.split()
                        if word.split("=")[0] in names)


ZBV = "--schedule=ZBVZeroBubble --stages-per-rank=2"
ZERO_BUBBLE = "--schedule=InterleavedZeroBubble --stages-per-rank=2"
INTERLEAVED = "--schedule=Interleaved1F1B --stages-per-rank=2"

CASES = {
    "One kind": [
        Case("DistributedDataParallel", "--data=2", True),
        Case("DistributedDataParallel", "--data=4"),
        Case("DistributedDataParallel", "--data=8"),
        Case("ZeroRedundancyOptimizer", "--data=2 --zero=private", True),
        Case("ZeroRedundancyOptimizer", "--data=4 --zero=private"),
        Case("ZeroRedundancyOptimizer, shared parameters", "--data=2 --zero=shared"),
        Case("ZeroRedundancyOptimizer, shared parameters", "--data=4 --zero=shared", True),
        Case("FullyShard, shared memory", "--shard=2", True),
        Case("FullyShard, shared memory", "--shard=4"),
        Case("FullyShard, shared memory", "--shard=8"),
        Case("FullyShard, private memory", "--shard=2 --private", True),
        Case("FullyShard, private memory", "--shard=4 --private"),
        Case("FullyShard, private memory", "--shard=8 --private"),
        Case("FullyShard, private memory, kept after forward",
             "--shard=2 --private --keep-unsharded"),
        Case("FullyShard, tied embedding", "--shard=2 --tied"),
        Case("FullyShard, hybrid", "--data=2 --shard=2", True),
        Case("FullyShard, hybrid, private memory",
             "--data=2 --shard=2 --private"),
        Case("FullyShard, hybrid", "--data=2 --shard=4"),
        Case("FullyShard, hybrid", "--data=4 --shard=2"),
        Case("tensor parallel", "--tensor=2", True),
        Case("tensor parallel", "--tensor=4"),
        Case("tensor parallel", "--tensor=8"),
        Case("tensor parallel and sequences", "--tensor=2 --sequence-parallel", True),
        Case("tensor parallel and sequences", "--tensor=4 --sequence-parallel"),
        Case("tensor parallel and sequences", "--tensor=8 --sequence-parallel"),
        Case("tensor parallel, tied embedding", "--tensor=2 --tied"),
        Case("tensor parallel and sequences, tied embedding",
             "--tensor=2 --tied --sequence-parallel"),
        Case("context, ring, zigzag", "--context=2", True),
        Case("context, ring, zigzag", "--context=4"),
        Case("context, ring, zigzag", "--context=8"),
        Case("context, ring, plain", "--context=2 --order=plain"),
        Case("context, ring, plain", "--context=4 --order=plain"),
        Case("context, ring, plain", "--context=8 --order=plain"),
        Case("context, exchanged heads", "--context=2 --order=heads", True),
        Case("context, exchanged heads", "--context=4 --order=heads"),
        Case("context, exchanged heads", "--context=8 --order=heads"),
        Case("context, uneven lengths", "--context=2 --length=17"),
        Case("context, uneven lengths", "--context=4 --length=19"),
        Case("context, uneven lengths, plain",
             "--context=4 --length=18 --order=plain"),
    ],
    "Pipelines": [
        Case("GPipe", "--pipeline=2 --schedule=GPipe"),
        Case("GPipe", "--pipeline=4 --schedule=GPipe"),
        Case("1F1B", "--pipeline=2", True),
        Case("1F1B", "--pipeline=4"),
        Case("1F1B", "--pipeline=8 --blocks=8 --micro-batches=8"),
        Case("1F1B, uneven micro-batches", "--pipeline=2 --micro-batches=5"),
        Case("1F1B, tied embedding", "--pipeline=2 --tied"),
        Case("LoopedBFS",
             "--pipeline=2 --schedule=LoopedBFS --stages-per-rank=2"),
        Case("Interleaved1F1B", f"--pipeline=2 {INTERLEAVED}"),
        Case("Interleaved1F1B", f"--pipeline=4 --blocks=8 {INTERLEAVED}"),
        Case("InterleavedZeroBubble", f"--pipeline=2 {ZERO_BUBBLE}", True),
        Case("InterleavedZeroBubble", f"--pipeline=4 --blocks=8 {ZERO_BUBBLE}"),
        Case("InterleavedZeroBubble, one stage a rank",
             "--pipeline=4 --schedule=InterleavedZeroBubble"),
        Case("ZBVZeroBubble", f"--pipeline=2 {ZBV}", True),
        Case("ZBVZeroBubble", f"--pipeline=4 --blocks=8 {ZBV}"),
        Case("ZBVZeroBubble", f"--pipeline=8 --blocks=16 {ZBV}"),
        Case("ZBVZeroBubble, tied embedding", f"--pipeline=2 --tied {ZBV}"),
        Case("DualPipeV",
             "--pipeline=2 --schedule=DualPipeV --stages-per-rank=2"),
    ],
    "Activation checkpointing": [
        Case("one process", "--checkpoint", True),
        Case("DistributedDataParallel",
             "--data=2 --checkpoint"),
        Case("FullyShard, shared memory",
             "--shard=2 --checkpoint"),
        Case("FullyShard, private memory",
             "--shard=2 --private --checkpoint", True),
        Case("tensor parallel and sequences",
             "--tensor=2 --sequence-parallel --checkpoint"),
        Case("context", "--context=2 --checkpoint"),
        Case("pipeline, zero bubble",
             f"--pipeline=2 {ZBV} --checkpoint"),
        Case("shard x tensor",
             "--shard=2 --tensor=2 --private --checkpoint"),
    ],
    "Two kinds": [
        Case("data x tensor", "--data=2 --tensor=2", True),
        Case("data x tensor", "--data=2 --tensor=4 --sequence-parallel"),
        Case("shard x tensor", "--shard=2 --tensor=2"),
        Case("shard x tensor, private memory, sequences",
             "--shard=2 --tensor=2 --private --sequence-parallel", True),
        Case("shard x tensor", "--shard=4 --tensor=2"),
        Case("context x data", "--context=2 --data=2", True),
        Case("context x data, ring of 4", "--context=4 --data=2"),
        Case("context x data, ZeroRedundancyOptimizer",
             "--context=2 --data=2 --zero=private"),
        Case("context x shard", "--context=2 --shard=2"),
        Case("context x shard, private memory",
             "--context=2 --shard=2 --private", True),
        Case("tensor x context", "--tensor=2 --context=2", True),
        Case("tensor x context, sequences",
             "--tensor=2 --context=2 --sequence-parallel"),
        Case("tensor x context, exchanged heads",
             "--tensor=2 --context=4 --order=heads"),
        Case("pipeline x data, 1F1B", "--pipeline=2 --data=2"),
        Case("pipeline x data, zero bubble",
             f"--pipeline=2 --data=2 {ZERO_BUBBLE}"),
        Case("pipeline x data, ZBV", f"--pipeline=2 --data=2 {ZBV}", True),
        Case("pipeline x tensor", "--pipeline=2 --tensor=2", True),
        Case("pipeline x tensor, ZBV, sequences",
             f"--pipeline=2 --tensor=2 --sequence-parallel {ZBV}"),
        Case("pipeline x shard, 1F1B", "--pipeline=2 --shard=2"),
        Case("pipeline x shard, private memory, zero bubble",
             f"--pipeline=2 --shard=2 --private {ZERO_BUBBLE}"),
        Case("pipeline x shard, private memory, ZBV",
             f"--pipeline=2 --shard=2 --private {ZBV}"),
        Case("pipeline x context", "--pipeline=2 --context=2", True),
        Case("pipeline x context, ZBV", f"--pipeline=2 --context=2 {ZBV}"),
    ],
    "Three kinds": [
        Case("data x shard x tensor", "--data=2 --shard=2 --tensor=2"),
        Case("data x shard x tensor, private memory, sequences",
             "--data=2 --shard=2 --tensor=2 --private --sequence-parallel"),
        Case("data x pipeline x tensor", "--data=2 --pipeline=2 --tensor=2"),
        Case("data x pipeline x tensor, ZBV, sequences",
             f"--data=2 --pipeline=2 --tensor=2 --sequence-parallel {ZBV}"),
        Case("data x shard x pipeline",
             f"--data=2 --shard=2 --pipeline=2 {ZERO_BUBBLE}"),
        Case("pipeline x shard x tensor, sequences",
             f"--pipeline=2 --shard=2 --tensor=2 --sequence-parallel {ZBV}"),
        Case("context x pipeline x shard",
             "--context=2 --pipeline=2 --shard=2 --private"),
        Case("data x context x tensor", "--data=2 --context=2 --tensor=2"),
        Case("data x context x shard",
             "--data=2 --context=2 --shard=2 --private"),
        Case("data x context x pipeline, zero bubble",
             f"--data=2 --context=2 --pipeline=2 {ZERO_BUBBLE}"),
        Case("context x shard x tensor",
             "--context=2 --shard=2 --tensor=2 --sequence-parallel"),
        Case("context x pipeline x tensor, tied embedding",
             "--context=2 --pipeline=2 --tensor=2 --tied"),
        Case("context x shard x tensor, checkpointing",
             "--context=2 --shard=2 --tensor=2 --private"
             " --checkpoint"),
    ],
    "Attention without a mask": [
        Case("zigzag order (load balancing)",
             "--context=2 --non-causal", True),
        Case("zigzag order (load balancing)",
             "--context=4 --non-causal"),
        Case("exchanged heads",
             "--context=4 --non-causal --order=heads"),
        Case("zigzag order, chunks of one token",
             "--context=8 --non-causal"),
    ],
}

# Python's own training of the same model, and ours with the same division.
PYTHON_CASES = [
    Case("DistributedDataParallel", "--data=2"),
    Case("`fully_shard`", "--shard=2", True),
    Case("`fully_shard`", "--shard=4"),
    Case("`fully_shard`, hybrid", "--data=2 --shard=2"),
    Case("`parallelize_module`", "--tensor=2", True),
    Case("`parallelize_module`", "--tensor=4"),
    Case("`parallelize_module`, sequences", "--tensor=2 --sequence-parallel"),
    Case("`fully_shard` of `parallelize_module`", "--shard=2 --tensor=2"),
    Case("`ScheduleGPipe`", "--pipeline=2 --schedule=GPipe"),
    Case("`Schedule1F1B`", "--pipeline=2", True),
    Case("`Schedule1F1B`", "--pipeline=4"),
    Case("`ScheduleInterleaved1F1B`", f"--pipeline=2 {INTERLEAVED}"),
    Case("`ScheduleInterleavedZeroBubble`", f"--pipeline=2 {ZERO_BUBBLE}"),
    Case("`ScheduleZBVZeroBubble`", f"--pipeline=2 {ZBV}", True),
]

# The models of zoo.h, and the wrappers that do not take them.
ODD_MODELS = [
    ("recurrent", "an LSTM whose state is a reference argument", ["pipeline"]),
    ("tied", "one weight under two names", ["pipeline"]),
    ("max_norm", "an embedding with rows of limited norm, by `renorm_()` after"
     " each step", ["shard", "private", "pipeline"]),
    ("sparse", "an embedding with sparse gradients and an optimizer of its own",
     ["shard", "private", "pipeline"]),
    ("norm", "SyncBatchNorm", ["pipeline"]),
    ("dropout", "dropout, with the random numbers of each rank", ["pipeline"]),
    ("complex", "complex parameters", ["shard", "private", "pipeline"]),
    ("adaptive", "AdaptiveLogSoftmaxWithLoss", ["pipeline"]),
    ("branches", "branches that are used in turn, and one that is not",
     ["pipeline"]),
    ("buffer", "a buffer that forward writes", ["shard", "private", "pipeline"]),
    ("layouts", "parameters without dimensions, without elements, transposed",
     []),
    ("weight_norm", "direction and length of weights apart", []),
    ("convolution", "channels-last weights, and operations in place", []),
]
ODD_WRAPPERS = ["ddp", "zero", "shard", "private", "pipeline"]

# Saved with the first division after half of the steps, continued with the
# second one.
SNAPSHOTS = [
    ("--shard=4", "--shard=2", False),
    ("--shard=2 --private", "--tensor=2", False),
    ("--shard=2 --tensor=2", "--data=2", True),
    ("--shard=2 --tensor=2", "--shard=4 --private", False),
    ("--tensor=4", "--pipeline=4", False),
    ("--data=2 --zero=private", "--data=4 --zero=shared", False),
    ("--data=4 --zero=private", "", False),
    ("--pipeline=2 --tensor=2", "--shard=2", True),
    (f"--pipeline=2 {ZBV}", "--context=2 --shard=4", False),
    ("--data=2 --shard=2 --tensor=2", "--context=2", False),
    ("", "--shard=8", False),
]

# Mistakes that tests of their own look for: the mistake, the test program, the
# test, and the mutation (tests/mutations) that makes the mistake.
TRAPS = [
    ("The backward of a ring uses the first block of keys and values in every"
     " step.", "context_test", "RingAttention.EqualsOneProcess",
     "ring-backward-first-block"),
    ("The error grows with the ring.", "context_test",
     "RingAttention.ErrorDoesNotGrowWithTheRing", "ring-sums-in-half"),
    ("With load balancing, attention without a mask leaves out keys.",
     "context_test", "RingAttention.EqualsItWithoutAMaskInZigzagOrder",
     "ring-unmasked-zigzag"),
    ("With several axes the norm of gradients is wrong by the number of ranks"
     " (torchtitan issue 2318).", "amp_test",
     "LayoutNorm.IsThatOfTheWholeModel", "layout-replica-counted"),
    ("Stages divide their parameters differently, and their norm is wrong or"
     " never comes.", "amp_test",
     "LayoutNorm.StagesMayDivideTheirParametersDifferently",
     "layout-stage-too-early"),
    ("The first receive of a pipeline waits for a send that comes later.",
     "pipeline_schedule_test",
     "PipelineScheduleCheck.AFirstReceiveThatWaitsForALaterSendIsADeadlock",
     ""),
    ("Replicas of a stage average gradients before the last part of backward"
     " (PyTorch issue 144530).", "pipeline_test",
     "Pipeline.WithDdpGradientsAreAveragedAfterTheLastBackward", ""),
]


class Failed(Exception):
    """A program failed; the text says how."""


class Result:
    """What a training wrote."""

    def __init__(self, losses, norms, parameters):
        self.losses = losses
        self.norms = norms
        self.parameters = parameters  # arrays of numbers, by name

    @classmethod
    def read(cls, folder, name):
        numbers = json.loads((folder / f"{name}.json").read_text())
        return cls(numbers["losses"], numbers["norms"],
                   read_safetensors(folder / f"{name}.safetensors"))

    @classmethod
    def read_python(cls, folder, name):
        numbers = json.loads((folder / f"{name}.python.json").read_text())
        return cls(numbers["losses"], numbers["norms"], numbers["parameters"])

    def tail(self, steps):
        return Result(self.losses[-steps:], self.norms[-steps:],
                      self.parameters)

    def differences(self, other):
        """The largest ones of losses, norms and parameters."""
        if set(self.parameters) != set(other.parameters):
            raise Failed("other parameters: " + ", ".join(
                sorted(set(self.parameters) ^ set(other.parameters))))
        return (distance(self.losses, other.losses),
                distance(self.norms, other.norms),
                max(distance(values, other.parameters[name])
                    for name, values in self.parameters.items()))


def distance(one, other):
    if len(one) != len(other):
        raise Failed(f"{len(one)} numbers instead of {len(other)}")
    largest = 0.0
    for a, b in zip(one, other):
        # Not max(), which may drop a NaN.
        if not abs(a - b) <= largest:
            largest = abs(a - b)
            if largest != largest:
                return largest
    return largest


def read_safetensors(path):
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    values = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        values[name] = array.array({"F64": "d", "F32": "f"}[entry["dtype"]],
                                   data[begin + first:begin + end])
    return values


class Programs:
    """Starts trainings; results lie in one folder."""

    def __init__(self, build, python, folder):
        self.bin = build / "bin"
        self.python = python
        self.folder = folder
        self.errors = {}  # by name of the case
        self.environment = dict(os.environ, OMP_NUM_THREADS="1",
                                PYTHONDONTWRITEBYTECODE="1",
                                TMPDIR=str(folder))

    def train(self, cases):
        """Trains by proof_train or proof_zoo: pairs of a name and a Case. The
        cases with equal numbers of ranks share a job. If it fails, each one
        that has no result gets a job of its own."""
        by_ranks = {}
        for name, case in cases:
            by_ranks.setdefault((case.ranks(), case.program),
                                []).append((name, case))
        for job, group in sorted(by_ranks.items()):
            if self.run(self.ours(*job), group) is None:
                continue
            for name, case in group:
                if not (self.folder / f"{name}.json").exists():
                    self.errors[name] = self.run(self.ours(*job),
                                                 [(name, case)])

    def train_in_python(self, cases):
        for ranks in sorted({case.ranks() for _, case in cases}):
            group = [(name, case) for name, case in cases
                     if case.ranks() == ranks]
            error = self.run(
                [self.python, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={ranks}", HERE / "python_train.py"], group)
            for name, _ in group:
                if error:
                    self.errors[name] = error

    def ours(self, ranks, name):
        program = [self.bin / "tests" / name]
        if ranks == 1:
            return program
        return [self.bin / "lockstep", "run", "--standalone",
                f"--nproc-per-node={ranks}", *program]

    def run(self, command, cases):
        """Returns None, or what went wrong."""
        lines = self.folder / "cases"
        lines.write_text("".join(f"{name} {case.options}\n"
                                 for name, case in cases))
        status, output = finish([*command, lines, self.folder],
                                self.environment, 60 + 20 * len(cases))
        return None if status == 0 else f"status {status}: {output}"

    def result(self, name):
        try:
            return Result.read(self.folder, name)
        except OSError:
            raise Failed(self.errors.get(name) or "no result") from None

    def python_result(self, name):
        try:
            return Result.read_python(self.folder, name)
        except OSError:
            raise Failed(self.errors.get(name) or "no result") from None


def finish(command, environment, seconds):
    """Runs a program; returns its status and the end of what it printed."""
    try:
        done = subprocess.run([str(word) for word in command], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return -1, f"not done after {seconds} s"
    return done.returncode, done.stdout[-2000:]


class Report:
    """The tables, and whether a row has failed."""

    def __init__(self):
        self.lines = []
        self.rows = 0
        self.failures = []

    def heading(self, line):
        self.lines += ["", line, ""]

    def text(self, paragraph):
        self.lines += [*textwrap.wrap(paragraph, 80, break_long_words=False,
                                      break_on_hyphens=False), ""]

    def table(self, *columns):
        if self.lines and self.lines[-1]:
            self.lines.append("")
        self.lines.append("| " + " | ".join(columns) + " |")
        self.lines.append("|" + " --- |" * len(columns))

    def row(self, *cells, fails=""):
        """`fails`: why the row has failed, if it has."""
        self.rows += 1
        if fails:
            self.failures.append(f"{' | '.join(cells)}: {fails}")
            cells = (*cells[:-1], f"**{cells[-1] or 'failed'}**")
        self.lines.append("| " + " | ".join(cells) + " |")
        print(self.lines[-1], flush=True)

    def compared(self, cells, differences, bounds):
        """A row that ends with differences, each of which has a bound."""
        try:
            numbers = differences()
        except Failed as error:
            self.row(*cells, *("" for _ in bounds), fails=str(error))
            return
        exceeded = [f"{number:.1e} > {bound:g}"
                    for number, bound in zip(numbers, bounds)
                    if not number <= bound]
        self.row(*cells, *(f"{number:.1e}" if number else "0"
                           for number in numbers), fails=", ".join(exceeded))


def code(options):
    return f"`{options}`" if options else "one process"


def name_of(options, dtype):
    """A name for files, that of one case."""
    words = options.replace("--", "").replace("=", "-").replace(" ", "_")
    return f"{dtype}_{words or 'alone'}"


def with_dtype(case, dtype):
    return (name_of(case.options, dtype), dataclasses.replace(
        case, options=f"{case.options} --dtype={dtype}"))


def one_process(programs, report, quick):
    dtypes = ("float64",) if quick else ("float64", "float32")
    cases = [case for group in CASES.values() for case in group
             if case.quick or not quick]
    alone = {case.model() for case in cases} | {""}
    wanted = dict(with_dtype(case, dtype) for dtype in dtypes for case in
                  [Case("", model) for model in sorted(alone)] + cases)
    programs.train(list(wanted.items()))
    report.heading("## Equal to one process")
    report.text("The largest differences from one process after "
                f"{STEPS} steps: of a loss, of a norm of the gradients before "
                "clipping, of a parameter.")
    if not quick:
        one = programs.result(name_of("", "float64"))
        rounding = one.differences(programs.result(name_of("", "float32")))
        report.text(
            f"Bounds: {BOUND['float64']:g} in float64, {BOUND['float32']:g} in "
            "float32. The float32 rows are compared with one process in "
            "float32. One process in float32 differs from one process in "
            "float64 by " + ", ".join(f"{number:.1e}" for number in rounding) +
            ": sums in another order round as much again, and the bound leaves "
            "room for six times that. It is 1/500 of a step of the optimizer "
            "(learning rate 0.01).")
    for title, group in CASES.items():
        group = [case for case in group if case in cases]
        if not group:
            continue
        report.heading(f"### {title}")
        report.table("", "ranks", "options", *(
            f"{dtype}: {what}" if what == "loss" else what for dtype in dtypes
            for what in ("loss", "norm", "parameters")))
        for case in group:

            def differences(case=case):
                return [number for dtype in dtypes for number in
                        programs.result(name_of(case.options, dtype))
                        .differences(programs.result(
                            name_of(case.model(), dtype)))]

            report.compared(
                (case.what, str(case.ranks()), code(case.options)), differences,
                [BOUND[dtype] for dtype in dtypes for _ in range(3)])
        report.lines.append("")


def zoo(programs, report, _quick):
    def case(model, wrapper=""):
        options = f"--model={model}"
        if wrapper:
            options = f"--data=2 {options} --wrapper={wrapper}"
        return Case("", options, program="proof_zoo")

    cases = [case(model, wrapper) for model, _, without in ODD_MODELS
             for wrapper in ["", *ODD_WRAPPERS] if wrapper not in without]
    programs.train([(name_of(one.options, "float64"), one) for one in cases])
    report.heading("## Odd models")
    report.text(
        "Small models with something that the transformer does not have "
        "(`tests/proof/zoo.h`), trained on two ranks with AdamW (the one with "
        "sparse gradients with SGD) and clipped to a norm of 0.4. The largest "
        f"difference from one process in float64 after {STEPS} steps, of a "
        f"loss, a norm or a parameter; bound {BOUND['float64']:g}. Where there "
        "is not a number, the wrapper refuses the model, or the model cannot be "
        "divided so.")
    report.table("", "DistributedDataParallel", "ZeroRedundancyOptimizer",
                 "FullyShard, shared memory", "FullyShard, private memory",
                 "pipeline, 1F1B")
    for model, what, without in ODD_MODELS:
        alone = name_of(case(model).options, "float64")
        cells, failed = [], []
        for wrapper in ODD_WRAPPERS:
            if wrapper in without:
                cells.append("-")
                continue
            name = name_of(case(model, wrapper).options, "float64")
            try:
                number = max(programs.result(alone).differences(
                    programs.result(name)))
                cells.append(f"{number:.1e}" if number else "0")
                if not number <= BOUND["float64"]:
                    failed.append(f"{wrapper}: {number:.1e}")
            except Failed as error:
                cells.append("")
                failed.append(f"{wrapper}: {error}")
        report.row(what, *cells, fails="; ".join(failed))
    report.lines.append("")


def snapshots(programs, report, quick):
    """Half of the steps, a folder of snapshots, the other half elsewhere."""
    pairs = [(save, load) for save, load, in_quick in SNAPSHOTS
             if in_quick or not quick]
    saved, loaded = {}, {}
    for save, load in pairs:
        name = "saved_" + name_of(save, "float64")
        folder = programs.folder / f"{name}.snapshots"
        saved[name] = Case("", f"{save} --steps={STEPS // 2} --save={folder}/")
        loaded[(save, load)] = [
            (f"{name}_{kind}_{name_of(load, '')}",
             Case("", f"{load} --steps={steps} --load={folder}/"))
            for kind, steps in (("loaded", STEPS // 2), ("continued", STEPS))]
    programs.train([(name_of("", "float64"), Case("", "")), *saved.items()])
    programs.train([run for runs in loaded.values() for run in runs])
    report.heading("## Snapshots on other ranks")
    report.text(
        f"A folder of snapshots is saved after {STEPS // 2} steps and loaded "
        "by other ranks with another division. The parameters that they have "
        "then are compared with those that were saved, which must be equal bit "
        "by bit. They train on for as many steps, and losses, norms and "
        "parameters are compared with one process that was never stopped "
        f"({BOUND['float64']:g}).")
    report.table("saved by", "loaded by", "loaded parameters", "loss", "norm",
                 "parameters")
    for (save, load), ((at_once, _), (later, _)) in loaded.items():

        def differences(name=at_once[:at_once.index("_loaded")],
                        at_once=at_once, later=later):
            before = programs.result(name)
            after = programs.result(at_once)
            end = programs.result(later)
            parameters = Result([], [], before.parameters).differences(
                Result([], [], after.parameters))[2]
            alone = programs.result(name_of("", "float64"))
            return [parameters,
                    *end.differences(alone.tail(STEPS - STEPS // 2))]

        report.compared((code(save), code(load)), differences,
                        [0, *[BOUND["float64"]] * 3])
    report.lines.append("")


def python(programs, report, quick):
    cases = [case for case in PYTHON_CASES if case.quick or not quick]
    first = Case("", f"--first={programs.folder}/first.pt")
    programs.train([(name_of("", "float64"), first),
                    *(with_dtype(case, "float64") for case in cases)])
    programs.train_in_python([(name_of(case.options, "float64"), case)
                              for case in cases])
    report.heading("## Equal to Python")
    report.text(
        "The same model, first values and batches, trained by PyTorch's own "
        "classes on Gloo with the same division, in float64. PyTorch has no "
        "function for the norm over the stages of a pipeline, nor for tensors "
        "of several meshes, so the norm of its gradients is computed from "
        "whole gradients. The largest differences from ours; bound "
        f"{BOUND['float64']:g}. (PyTorch's context parallelism does not work "
        "on CPUs.)")
    report.table("Python", "ranks", "our options", "loss", "norm", "parameters")
    for case in cases:
        name = name_of(case.options, "float64")
        report.compared(
            (case.what, str(case.ranks()), code(case.options)),
            lambda name=name: programs.result(name).differences(
                programs.python_result(name)), [BOUND["float64"]] * 3)
    report.lines.append("")
    python_snapshots(programs, report, quick)


def python_snapshots(programs, report, quick):
    """Folders that the other language saved."""
    if subprocess.run([programs.python, "-c", "import safetensors"],
                      capture_output=True).returncode != 0:
        report.text("(Snapshots were not exchanged: that Python has no "
                    "safetensors.)")
        return
    divisions = ["--shard=2 --tensor=2"] if quick else [
        "--shard=2 --tensor=2", "--data=4 --zero=private",
        f"--pipeline=2 {ZBV}", "--data=2 --shard=2 --private"]
    python_divisions = ["--shard=2"] if quick else ["--shard=2", "--shard=4"]
    report.heading(
        "### Folders of snapshots and `torch.distributed.checkpoint`")
    report.text(
        "Saved by one and loaded by the other, with other numbers of ranks. "
        "The parameters must be equal bit by bit.")
    report.table("saved by", "loaded by", "parameters")
    ours = {f"for_python_{name_of(one, '')}": one for one in divisions}
    programs.train([
        (name, Case("", f"{one} --save={programs.folder}/{name}.snapshots/"))
        for name, one in ours.items()])
    programs.train_in_python([
        (f"{name}_{name_of(theirs, '')}", Case(
            "", f"{theirs} --load={programs.folder}/{name}.snapshots/latest"))
        for name in ours for theirs in python_divisions])
    for name, one in ours.items():
        for theirs in python_divisions:

            def differences(name=name, theirs=theirs):
                loaded = programs.python_result(f"{name}_{name_of(theirs, '')}")
                saved = programs.result(name)
                return [Result([], [], saved.parameters)
                        .differences(loaded)[2]]

            report.compared((code(one), f"`dcp.load`, {code(theirs)}"),
                            differences, [0])
    saved = f"{programs.folder}/python.dcp"
    programs.train_in_python([
        ("python_saves", Case("", f"--shard=2 --save={saved}"))])
    loads = {f"from_python_{name_of(one, '')}": one
             for one in [*divisions, "--shard=4", ""]}
    programs.train([(name, Case("", f"{one} --steps=0 --load={saved}/"))
                    for name, one in loads.items()])
    for name, one in loads.items():

        def differences(name=name):
            trained = programs.python_result("python_saves")
            return [Result([], [], trained.parameters)
                    .differences(programs.result(name))[2]]

        report.compared(("`dcp.save`, `--shard=2`", code(one)), differences,
                        [0])
    report.lines.append("")


def traps(programs, report, _quick):
    report.heading("## Known mistakes")
    report.text("Mistakes that other libraries have made. Each has "
                "a test of its own, which was run for this page, besides the "
                "rows above. `./dev mutate NAME` makes the mistake and shows "
                "that the test fails.")
    report.table("mistake", "test", "`./dev mutate`", "")
    for mistake, program, test, mutation in TRAPS:
        status, output = finish(
            [programs.bin / "tests" / program,
             f"--gtest_filter={test}:{test}/*"], programs.environment, 120)
        ran = re.search(r"\[  PASSED  \] [1-9]", output) is not None
        report.row(mistake, f"`{program}`, `{test}`",
                   f"`{mutation}`" if mutation else "", "passed",
                   fails="" if status == 0 and ran else output)
    report.lines.append("")


def counts(build, report, quick):
    """What is counted: memory, bytes, bubbles, tables of schedules."""
    try:
        import counts as counted
    except ModuleNotFoundError:
        return []
    try:
        return counted.sections(build, quick)
    except counted.Failure as failure:
        report.failures.append(str(failure))
        return []


def page(programs, report, sections):
    torch = json.loads((programs.folder / "float64_alone.json").read_text())
    version = subprocess.run([programs.bin / "lockstep", "--version"],
                             capture_output=True, text=True, check=True)
    first = Report()
    first.text(
        "Does a model that is divided over ranks learn what it would learn in "
        "one process, and in Python? This page has the differences, for every "
        "way to divide it and every combination that was tried. `./dev proof` "
        "runs everything on the page again and writes it. This one was made "
        f"with {version.stdout.strip()} and torch {torch['torch']}.")
    first.text(
        "Every row but those of [odd models](#odd-models) trains one model: a "
        "transformer with 4 blocks of 32 "
        "features and 8 heads, vocabulary 32, sequences of 16 tokens, 16 "
        "sequences a batch, with AdamW, gradients clipped to a norm of 0.4 "
        "(some steps are, others are not); `--blocks`, `--length` and `--tied` "
        "change it. `tests/proof/train.cpp` divides it "
        "over the ranks as the options say; `tests/proof/proof.py` compares. "
        "(If it averages gradients over `data` instead of data x context, six "
        "rows of `--quick` differ by 0.05 and more.)")
    text = "\n".join([
        "# Proof", "", *first.lines, *report.lines, *sections])
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--build", type=pathlib.Path, required=True)
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--part", action="append", choices=PARTS)
    options.add_argument("--write", type=pathlib.Path)
    options = options.parse_args()
    build = options.build.resolve()
    parts = options.part or PARTS
    report = Report()
    with tempfile.TemporaryDirectory(prefix="lockstep-proof-") as folder:
        programs = Programs(build, options.python, pathlib.Path(folder))
        functions = {"process": one_process, "zoo": zoo,
                     "snapshots": snapshots, "python": python, "traps": traps}
        for part in PARTS:
            if part in parts:
                functions[part](programs, report, options.quick)
        if options.write:
            sections = counts(build, report, options.quick)
            options.write.write_text(page(programs, report, sections))
    print(f"{report.rows} rows, {len(report.failures)} failed")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
