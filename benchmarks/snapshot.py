"""Saving and loading a model of float32 parameters in memory (a tmpfs): ours
beside a plain write, torch.save, torch.load and PyTorch's distributed checkpoint
(DCP)."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

from processes import Failure, PEERS, RANKS, run_child
from training import PEER_ATTEMPTS

FORMAT = 1
BYTES = 1 << 30
QUICK_BYTES = 16 << 20
# The bytes of a model of many tensors: little, so that names and headers count.
MANY, MANY_BYTES = 10_000, 40 << 20
QUICK_MANY = 1_000
REPEATS = 3  # timed, of one program; another one before is not
# A file system in memory, so that no disk is measured.
TMPFS = pathlib.Path("/dev/shm")
# How often the model's bytes must fit there: what is loaded on both sides, and
# what one of them saves; and once more, so that nothing else runs short.
COPIES = 4


@dataclasses.dataclass
class Side:
    """One way to save or to load."""

    name: str
    what: str
    do: str  # the argument of the program
    ranks: int = 1
    is_python: bool = False
    package: str = None     # that Python must have besides torch
    many: bool = False      # tensors

    @property
    def loads(self):
        return "load" in self.do


SIDES = [
    Side("plain_write", "plain write, one process", "plain_write"),
    Side("save_1", "ours, 1 rank: save", "save"),
    Side("save_2", "ours, 2 ranks: save", "save", ranks=RANKS),
    Side("torch_save", "torch.save, 1 process", "torch_save", is_python=True),
    Side("dcp", "DCP, 2 processes: save", "dcp_save", ranks=RANKS,
         is_python=True),
    Side("dcp_safetensors", "DCP, 2 processes: save as safetensors",
         "dcp_save_safetensors", ranks=RANKS, is_python=True,
         package="safetensors"),
    Side("load", "ours, 1 rank: load, verified", "load"),
    Side("load_mapped", "ours, 1 rank: load, mapped", "load_mapped"),
    Side("torch_load", "torch.load and load_state_dict", "torch_load",
         is_python=True),
    Side("async", "ours, 2 ranks: SnapshotSaver", "async", ranks=RANKS),
    Side("async_overlapped", "ours, 2 ranks: SnapshotSaver, overlap_copy",
         "async_overlapped", ranks=RANKS),
    Side("dcp_async", "DCP, 2 processes: save asynchronously", "dcp_async",
         ranks=RANKS, is_python=True),
    Side("save_many", "ours, 2 ranks: save 10,000 tensors", "save", ranks=RANKS,
         many=True),
    Side("load_many", "ours, 2 ranks: load 10,000 tensors", "load", ranks=RANKS,
         many=True),
    Side("dcp_many", "DCP, 2 processes: save 10,000 tensors", "dcp_save",
         ranks=RANKS, is_python=True, many=True),
    Side("dcp_load_many", "DCP, 2 processes: load 10,000 tensors", "dcp_load",
         ranks=RANKS, is_python=True, many=True),
]

# Saves come before loads.
PREPARED = [
    Side("prepare", "", "prepare"),
    Side("prepare", "", "prepare", is_python=True),
    Side("prepare", "", "prepare", many=True),
    Side("prepare", "", "prepare_dcp", is_python=True, ranks=RANKS, many=True),
]


@dataclasses.dataclass
class Figure:
    """A ratio of two fields of two sides, and its target. Without `under` it is
    `over` itself, in milliseconds."""

    name: str
    what: str
    over: tuple          # (side, field)
    under: tuple = None
    at_most: float = None
    at_least: float = None


FIGURES = [
    Figure("save_1_by_plain_write", "ours, 1 rank / plain write",
           ("save_1", "seconds"), ("plain_write", "seconds"), at_most=1.1),
    Figure("torch_save_by_save_2", "torch.save / ours, 2 ranks",
           ("torch_save", "seconds"), ("save_2", "seconds"), at_least=1.4),
    Figure("dcp_by_save_2", "DCP / ours, 2 ranks",
           ("dcp", "seconds"), ("save_2", "seconds"), at_least=2),
    Figure("dcp_safetensors_by_save_2", "DCP as safetensors / ours, 2 ranks",
           ("dcp_safetensors", "seconds"), ("save_2", "seconds")),
    Figure("torch_load_by_load", "torch.load / ours, verified",
           ("torch_load", "seconds"), ("load", "seconds"), at_least=2),
    Figure("load_mapped_ms", "ours, mapped: ms", ("load_mapped", "seconds"),
           at_most=10),
    Figure("load_peak_by_model", "ours: peak memory / model",
           ("load", "peak_bytes"), ("load", "bytes"), at_most=1.1),
    Figure("torch_load_peak_by_model", "torch.load: peak memory / model",
           ("torch_load", "peak_bytes"), ("torch_load", "bytes")),
    Figure("async_stall_by_save_2", "ours: async stall / synchronous save",
           ("async", "stall_seconds"), ("save_2", "seconds")),
    Figure("overlapped_stall_by_save_2",
           "ours, overlap_copy: async stall / synchronous save",
           ("async_overlapped", "stall_seconds"), ("save_2", "seconds"),
           at_most=0.05),
    Figure("overlapped_slowdown_by_save_2",
           "ours, overlap_copy: slower computing / synchronous save",
           ("async_overlapped", "slowdown_seconds"), ("save_2", "seconds")),
    Figure("dcp_async_stall_by_dcp", "DCP: async stall / synchronous save",
           ("dcp_async", "stall_seconds"), ("dcp", "seconds")),
    Figure("dcp_many_by_save_many", "10,000 tensors: DCP's save / ours",
           ("dcp_many", "seconds"), ("save_many", "seconds"), at_least=1),
    Figure("dcp_load_many_by_load_many", "10,000 tensors: DCP's load / ours",
           ("dcp_load_many", "seconds"), ("load_many", "seconds"), at_least=1),
]


@contextlib.contextmanager
def folder_in_memory(size, tmpfs=TMPFS):
    """Makes a folder and removes it in any case. Raises Failure if there is no
    room for the benchmark."""
    needed = COPIES * size
    try:
        free = shutil.disk_usage(tmpfs).free
    except OSError as error:
        raise Failure(f"{tmpfs} cannot be used: {error.strerror}") from error
    if free < needed:
        raise Failure(f"{tmpfs} has {free >> 20} MiB free, and the benchmark "
                      f"needs {needed >> 20} MiB; remove files there, or give "
                      "it more memory")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-",
                                     dir=tmpfs) as folder:
        yield pathlib.Path(folder)


def sides_here(note):
    """Returns the sides that can run, and says which cannot."""
    here = []
    for side in SIDES:
        if side.package and importlib.util.find_spec(side.package) is None:
            note(f"snapshot: {side.name} is left out, {sys.executable} has no "
                 f"{side.package}; run {sys.executable} -m pip install "
                 f"--no-deps {side.package}")
            continue
        here.append(side)
    return here


def command_of(side, place, folder, size):
    arguments = ["--do", side.do, "--folder", folder,
                 "--bytes", MANY_BYTES if side.many else size,
                 "--repeats", 1 if place.quick else REPEATS]
    if side.many:
        arguments += ["--tensors", QUICK_MANY if place.quick else MANY]
    if side.ranks > 1:
        return (place.programs.python("snapshot_peer.py", *arguments)
                if side.is_python else
                place.programs.lockstep("benchmarks/snapshot", *arguments,
                                        ranks=side.ranks))
    if side.is_python:
        return list(map(str, [sys.executable, PEERS / "snapshot_peer.py",
                              *arguments]))
    program = place.programs.build / "bin" / "benchmarks" / "snapshot"
    return place.programs.existing(program, "./dev build",
                                   [program, *arguments])


def run_side(side, place, folder, size):
    """Returns the figures of one program: medians over its repetitions."""
    command = command_of(side, place, folder, size)
    # One process may use every core, as the threads that ours reads with do.
    threads = 1 if side.ranks > 1 else len(os.sched_getaffinity(0))
    attempts = PEER_ATTEMPTS if side.is_python else 1
    for attempt in range(attempts):
        try:
            stdout, _ = run_child(command, place.scratch, threads)
            break
        except Failure as failure:
            if not failure.is_of_child or attempt + 1 == attempts:
                raise
            print(f"bench: the peer {failure}; trying again", file=sys.stderr)
    for line in stdout.splitlines():
        try:
            figures = json.loads(line)
            figures["bytes"]
            break
        except (ValueError, KeyError, TypeError):
            continue  # a library's line
    else:
        raise Failure(f"printed no figures: {' '.join(command)}", stdout)
    return {field: statistics.median(value) if isinstance(value, list) else value
            for field, value in figures.items() if value != []}


def measure(rounds, place, progress, tmpfs=TMPFS):
    """Returns summarise() of the figures of every round."""
    size = QUICK_BYTES if place.quick else BYTES
    sides = sides_here(lambda line: print(line, file=sys.stderr))
    figures = {side.name: [] for side in sides}
    with folder_in_memory(size, tmpfs) as folder:
        of_many = folder / "many"
        of_many.mkdir()
        for side in PREPARED:
            if not any(one.loads and (one.many, one.is_python) ==
                       (side.many, side.is_python) for one in sides):
                continue
            progress("snapshot: saving what will be loaded")
            run_side(side, place, of_many if side.many else folder, size)
        for round_ in range(rounds):
            # Another side is first in each round, as a side may gain by running
            # after another.
            first = round_ % len(sides)
            for side in sides[first:] + sides[:first]:
                progress(f"snapshot: round {round_ + 1}/{rounds}, {side.what}")
                # A folder of its own; what is loaded lies in another.
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    loaded = of_many if side.many else folder
                    where = loaded if side.loads else own
                    figures[side.name].append(
                        run_side(side, place, where, size))
    progress("")
    return summarise(size, figures)


def summarise(size, figures):
    sides = []
    for side in SIDES:
        rounds = figures.get(side.name)
        entry = {"name": side.name, "what": side.what, "ranks": side.ranks}
        if rounds:
            for field in ("seconds", "stall_seconds", "slowdown_seconds",
                          "peak_bytes"):
                if field in rounds[0]:
                    entry[field] = statistics.median(
                        one[field] for one in rounds)
        sides.append({**entry, "rounds": rounds or []})
    return {"bytes": size, "sides": sides,
            "ratios": [ratio_of(figure, figures) for figure in FIGURES]}


def ratio_of(figure, figures):
    """Returns a ratio: the median of the ratios of the rounds. It has no
    "value" if a side is missing."""
    result = {"name": figure.name, "what": figure.what}
    for bound in ("at_most", "at_least"):
        if getattr(figure, bound) is not None:
            result["target"] = {bound: getattr(figure, bound)}

    def rounds_of(place):
        side, field = place
        return [one[field] for one in figures.get(side) or []]

    over = rounds_of(figure.over)
    under = rounds_of(figure.under) if figure.under else [0.001] * len(over)
    if not over or not under:
        return result
    values = [a / b for a, b in zip(over, under)]
    value = statistics.median(values)
    result.update(value=round(value, 3), min=round(min(values), 3),
                  max=round(max(values), 3))
    if "target" in result:
        result["target_met"] = (
            value <= figure.at_most if figure.at_most is not None
            else value >= figure.at_least)
    return result


def table(results):
    """Returns the two tables: times, and ratios with their targets."""
    lines = ["| | time | GB/s | blocks |", "| --- | ---: | ---: | ---: |"]
    for side in results["sides"]:
        cells = ["-", "-", "-"]
        if "seconds" in side:
            cells[0] = milliseconds(side["seconds"])
            if side["name"] != "load_mapped":  # which reads nothing
                size = side["rounds"][0]["bytes"]
                cells[1] = f"{size / side['seconds'] / 1e9:.2f}"
            cells[2] = milliseconds(side.get("stall_seconds", side["seconds"]))
        lines.append(f"| {side['what']} | {' | '.join(cells)} |")
    lines += ["", "| ratio | | of the rounds | target |",
              "| --- | ---: | ---: | ---: |"]
    for ratio in results["ratios"]:
        cells = ["-", "-", "-"]
        if "value" in ratio:
            cells[0] = f"{ratio['value']:.2f}"
            cells[1] = f"{ratio['min']:.2f}-{ratio['max']:.2f}"
        for bound, sign in (("at_most", "<="), ("at_least", ">=")):
            if bound in ratio.get("target", {}):
                met = {True: " met", False: " MISSED"}.get(
                    ratio.get("target_met"), "")
                cells[2] = f"{sign} {ratio['target'][bound]:g}{met}"
        lines.append(f"| {ratio['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(seconds):
    ms = seconds * 1000
    return f"{ms:.2f} ms" if ms < 100 else f"{ms:,.0f} ms"
