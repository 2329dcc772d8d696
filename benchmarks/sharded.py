"""A model that is divided over the ranks, the example gpt: ours beside Python's
FSDP2 and tensor parallel on Gloo, what each way costs beside plain DDP, and a
model for which a rank has too little memory."""

import dataclasses
import json
import pathlib
import resource
import statistics
import sys

from processes import Failure, RANKS, run_child
from ratios import Ratio, goal, ratio_of, row, rule, shown
from training import PEER_ATTEMPTS

FORMAT = 1
# The report has a loss after every tenth step.
STEPS = 40
QUICK_STEPS = 10
# The first steps allocate memory and learn the order of units.
DROPPED = 10
QUICK_DROPPED = 3
# How far the losses of two sides may be apart: both compute in float32, in
# another order, and the difference grows from step to step. Another learning
# rate or order of samples changes more than that.
LOSS_TOLERANCE = 1e-2
TEXT = (pathlib.Path(__file__).resolve().parents[1] / "datasets" /
        "shakespeare" / "shakespeare.txt")
QUICK_MODEL = ("--layers", 2, "--heads", 2, "--width", 32, "--context", 16)


@dataclasses.dataclass
class Side:
    """One way to divide the model."""

    name: str
    what: str
    options: tuple
    is_python: bool = False


SIDES = [
    Side("ddp", "ours, DDP", ()),
    Side("fsdp", "ours, FSDP, shared memory", ("--shard", RANKS)),
    Side("fsdp_private", "ours, FSDP, no shared memory",
         ("--shard", RANKS, "--no-shared-memory")),
    Side("tensor", "ours, tensor parallel", ("--tensor", RANKS)),
    Side("checkpoint", "ours, DDP, checkpointing", ("--checkpoint",)),
    Side("python_fsdp", "Python, FSDP2", ("--parallel", "fsdp"), True),
    Side("python_tensor", "Python, tensor parallel", ("--parallel", "tensor"),
         True),
]


RATIOS = [
    Ratio("python_fsdp", "fsdp", at_least=2),
    Ratio("fsdp", "ddp", at_most=1.05),
    Ratio("fsdp_private", "ddp", at_most=1.3),
    Ratio("python_tensor", "tensor", at_least=2),
    Ratio("checkpoint", "ddp", at_most=1.35),
]

# Sequences of a step, all ranks together: the example's own number; and few,
# as ranks have if there are many of them.
BATCH_SIZES = (16, 4)


@dataclasses.dataclass
class Limited:
    """A model of whose parameters, gradients and optimizer state a rank may have
    less than all."""

    layers: int
    limit_mib: int  # of each process's own memory (RLIMIT_DATA)

    @property
    def needed_mib(self):
        """Returns what the layers' parameters take in float32, four times:
        value, gradient and two moments."""
        width = LIMITED_WIDTH
        weights = 12 * width * width + 13 * width
        return (16 * self.layers * weights) >> 20


LIMITED_WIDTH = 1024
LIMITED = Limited(layers=8, limit_mib=1150)
QUICK_LIMITED = Limited(layers=4, limit_mib=650)


def command_of(side, batch_size, report, place):
    arguments = ["--batch-size", batch_size, "--text", TEXT,
                 "--steps", QUICK_STEPS if place.quick else STEPS,
                 *(QUICK_MODEL if place.quick else ()),
                 "--report", report, *side.options]
    if side.is_python:
        return place.programs.python("gpt_peer.py", *arguments)
    return place.programs.lockstep("gpt", "--sample", 0, *arguments)


def run_side(side, batch_size, place):
    """Returns the figures of one program: its losses, and the median time of
    its steps."""
    report = place.scratch / "report.json"
    report.unlink(missing_ok=True)
    command = command_of(side, batch_size, report, place)
    attempts = PEER_ATTEMPTS if side.is_python else 1
    for attempt in range(attempts):
        try:
            run_child(command, place.scratch)
            break
        except Failure as failure:
            if not failure.is_of_child or attempt + 1 == attempts:
                raise
            print(f"bench: the peer {failure}; trying again", file=sys.stderr)
    try:
        figures = json.loads(report.read_text())
        seconds = figures["step_seconds"]
        losses = figures["losses"]
    except (OSError, ValueError, KeyError) as error:
        raise Failure(f"wrote no report: {' '.join(command)}") from error
    if side.is_python:  # ours reports every tenth
        losses = losses[9::10]
    seconds = sorted(seconds[QUICK_DROPPED if place.quick else DROPPED:])
    return {"median_ms": round(statistics.median(seconds) * 1e3, 3),
            "p90_ms": round(seconds[int(0.9 * (len(seconds) - 1))] * 1e3, 3),
            "losses": losses}


def measure(rounds, place, progress):
    """Returns summarise() of the figures of every round."""
    if not TEXT.exists():
        raise Failure(f"{TEXT} is missing; get it from the repository")
    figures = {size: {side.name: [] for side in SIDES} for size in BATCH_SIZES}
    for round_ in range(rounds):
        for size in BATCH_SIZES:
            # Another side is first in each round, as a side may gain by running
            # after another.
            first = round_ % len(SIDES)
            for side in SIDES[first:] + SIDES[:first]:
                progress(f"sharded: round {round_ + 1}/{rounds}, "
                         f"{size} sequences, {side.what}")
                figures[size][side.name].append(run_side(side, size, place))
    limited = []
    for side in SIDES[:3]:
        progress(f"sharded: a limit of memory, {side.what}")
        limited.append(run_limited(
            side, QUICK_LIMITED if place.quick else LIMITED, place))
    progress("")
    return summarise(figures, limited)


# --- Too little memory.

def run_limited(side, model, place):
    """Returns whether the side trains within the limit, and if not, the line
    that says why."""
    command = place.programs.lockstep(
        "gpt", "--sample", 0, "--text", TEXT, "--layers", model.layers,
        "--heads", 8, "--width", LIMITED_WIDTH, "--context", 16,
        "--batch-size", 4, "--steps", 3, *side.options)
    result = {"name": side.name, "what": side.what,
              "needed_mib": model.needed_mib, "limit_mib": model.limit_mib}
    limit = (resource.RLIMIT_DATA, model.limit_mib << 20)
    try:
        run_child(command, place.scratch, limit=limit)
        return {**result, "trains": True}
    except Failure as failure:
        if not failure.is_of_child:
            raise
        lines = [line for line in failure.output.splitlines()
                 if line.startswith("rank ") and "out of memory" in line]
        if not lines:
            raise
        return {**result, "trains": False, "line": min(lines)}


# --- What is said of the figures.

def summarise(figures, limited):
    """Returns the JSON's fields. `figures`: batch size -> name of a side -> the
    figures of each round."""
    return {"workloads": [summary_of(size, sides)
                          for size, sides in figures.items()],
            "limited": [{**one, "target_met":
                         one["trains"] == (one["name"] != "ddp")}
                        for one in limited]}


def summary_of(batch_size, figures):
    reference = figures["ddp"][0]["losses"]
    differences = [abs(a - b) for rounds in figures.values() for one in rounds
                   for a, b in zip(one["losses"], reference, strict=True)]
    # NaN is apart from everything.
    wrong = [one for one in differences if not one <= LOSS_TOLERANCE]
    if wrong:
        raise Failure(f"the losses of two programs are {wrong[0]:g} apart, "
                      "so they did not train the same model; "
                      f"allowed are {LOSS_TOLERANCE:g}")
    return {"batch_size": batch_size, "loss_difference": max(differences),
            "sides": [{"name": side.name, "what": side.what,
                       **{field: round(statistics.median(
                           one[field] for one in figures[side.name]), 3)
                          for field in ("median_ms", "p90_ms")},
                       "rounds": figures[side.name]} for side in SIDES],
            "ratios": [ratio_of(ratio, figures) for ratio in RATIOS]}


def table(results):
    """Returns three tables: times, ratios with their targets, and which sides
    train within the limit of memory."""
    works = results["workloads"]
    heads = [f"{one['batch_size']} sequences" for one in works]
    lines = [row(["a step, p50 / p90", *heads]), rule(len(heads))]
    for i, side in enumerate(SIDES):
        lines.append(row([side.what, *(
            f"{one['sides'][i]['median_ms']:.1f} / "
            f"{one['sides'][i]['p90_ms']:.1f} ms" for one in works)]))
    what = {side.name: side.what for side in SIDES}
    lines += ["", row(["ratio", *heads, "target"]), rule(len(heads) + 1)]
    for i, ratio in enumerate(works[0]["ratios"]):
        lines.append(row([
            f"{what[ratio['over']]} / {what[ratio['under']]}",
            *(shown(one["ratios"][i]) for one in works),
            goal(ratio["target"])]))
    needed = results["limited"][0]
    lines += ["", row([f"{needed['needed_mib']} MiB of parameters, gradients "
                       f"and state; {needed['limit_mib']} MiB for a rank", "",
                       "target"]), rule(2)]
    for one in results["limited"]:
        lines.append(row([
            one["what"],
            "trains" if one["trains"] else one["line"].split(";")[0],
            ("fails" if one["name"] == "ddp" else "trains") +
            (" met" if one["target_met"] else " MISSED")]))
    return "\n".join(lines)
