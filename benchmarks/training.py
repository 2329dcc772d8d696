"""Training beside PyTorch's Python: what `./dev bench` times, and what it says
of the figures. Fields and columns: docs/internals/benchmarks.md."""

import dataclasses
import json
import pathlib
import statistics
import sys

from processes import Failure, Programs, RANKS, progress, run_child

# Each side uses its best backend: the one that a program gets if it names none.
BACKEND = {"lockstep": "lockstep", "copied": "lockstep",
           "without_communication": "lockstep", "python": "gloo"}
# Python's Gloo aborts now and then when its processes end (torch 2.13,
# "terminate called without an active exception"), after all work is done. Such
# a run does not count and is repeated; one of ours that fails ends the bench.
PEER_ATTEMPTS = 3
QUICK_SHARE = 5


@dataclasses.dataclass
class Place:
    """Where and how a benchmark runs."""

    programs: Programs
    scratch: pathlib.Path
    traces: pathlib.Path  # folder; exists
    quick: bool


class Job:
    """The tutorial's job from launch to exit."""

    unit = "s"
    sides = ("lockstep", "python")
    what = "Linear(20, 1), 2,048 samples, 50 epochs, a snapshot every 10"
    targets = {}

    def measure(self, side, name, place):
        snapshot = place.scratch / "snapshot.pt"
        arguments = ("5" if place.quick else "50", "10",
                     "--snapshot", snapshot)
        command = (place.programs.python("job_peer.py", *arguments)
                   if side == "python" else
                   place.programs.lockstep("multigpu_torchrun", *arguments))
        # Removes what a failed try has left: the job would resume from it.
        snapshot.unlink(missing_ok=True)
        _, seconds = run_child(command, place.scratch)
        if not snapshot.exists():
            raise Failure(f"saved no snapshot: {' '.join(command)}")
        snapshot.unlink()
        return {"median": round(seconds, 4)}


@dataclasses.dataclass
class Step:
    """One training step, the slowest rank's, in microseconds."""

    model: str
    what: str
    steps: int         # of ours, also without communication
    python_steps: int  # fewer, as they take longer
    faster: float      # the target: Python's time divided by ours
    cost: float        # the target: ours divided by that without communication
    aim: float = None  # what the cost is hoped to be
    optimizer: str = "sgd"
    ours: tuple = ()   # arguments of our program alone

    unit = "us"
    # "copied" is ours with place_gradients = false.
    sides = ("lockstep", "copied", "python", "without_communication")

    @property
    def targets(self):
        cost = {"at_most": self.cost}
        if self.aim is not None:
            cost["aim"] = self.aim
        return {"ratio": {"at_least": self.faster}, "communication_ratio": cost}

    def measure(self, side, name, place):
        steps = self.python_steps if side == "python" else self.steps
        if place.quick:
            steps = max(5, steps // QUICK_SHARE)
        arguments = ["--model", self.model, "--optimizer", self.optimizer,
                     "--backend", BACKEND[side], "--steps", steps,
                     "--warmup", max(3, steps // 5)]
        if side == "without_communication":
            arguments.append("--no-ddp")
        elif side == "copied":
            arguments += [*self.ours, "--copy-gradients"]
        elif side == "lockstep":
            arguments += [*self.ours, "--trace", place.traces / f"{name}.json"]
        command = (place.programs.python("ddp_peer.py", *arguments)
                   if side == "python" else
                   place.programs.lockstep("benchmarks/ddp_step", *arguments))
        stdout, _ = run_child(command, place.scratch)
        for line in stdout.splitlines():
            try:
                figures = json.loads(line)
                return {"median": figures["median_us"], **figures}
            except (ValueError, KeyError, TypeError):
                continue  # a library's line
        raise Failure(f"printed no figures: {' '.join(command)}", stdout)


STEPS = {
    "tutorial": Step(
        "tutorial", "Linear(20, 1) with its loader, SGD",
        steps=4000, python_steps=600, faster=20, cost=1.10),
    "mlp": Step(
        "mlp", "20-2048-2048-1, 4.2 M parameters, SGD",
        steps=60, python_steps=30, faster=2.5, cost=1.25),
    "mlp_zero": Step(
        "mlp", "the same, fused AdamW; ours sharded, parameters shared",
        steps=60, python_steps=30, faster=3, cost=1.10, aim=1.0,
        optimizer="adamw", ours=("--zero",)),
    "narrow": Step(
        "narrow", "66 layers of 64, SGD",
        steps=400, python_steps=150, faster=2.8, cost=1.15),
    "transformer": Step(
        "transformer",
        "4 layers, 256 wide, feed-forward 1,024, 64 tokens, fused AdamW",
        steps=100, python_steps=60, faster=1.25, cost=1.10,
        optimizer="adamw"),
}
BENCHMARKS = {"job": Job(), **STEPS}


def measure(names, rounds, place):
    """Returns name -> side -> the figures of each round."""
    figures = {name: {side: [] for side in BENCHMARKS[name].sides}
               for name in names}
    for round_ in range(rounds):
        for name in names:
            # Another side is first in each round, as a side may gain by running
            # after another.
            sides = list(BENCHMARKS[name].sides)
            first = round_ % len(sides)
            for side in sides[first:] + sides[:first]:
                progress(f"round {round_ + 1}/{rounds}: {name}, "
                         f"{side.replace('_', ' ')}")
                figures[name][side].append(measure_once(name, side, place))
    progress("")
    return figures


def measure_once(name, side, place):
    attempts = PEER_ATTEMPTS if side == "python" else 1
    for failed in range(attempts):
        try:
            result = BENCHMARKS[name].measure(side, name, place)
            return {**result, "failed": failed} if failed else result
        except Failure as failure:
            if not failure.is_of_child or failed + 1 == attempts:
                raise
            progress("")
            print(f"bench: the peer {failure}; trying again", file=sys.stderr)


# --- What is said of the figures.

def summarise(name, sides):
    """Returns one entry of the JSON's "benchmarks"."""
    benchmark = BENCHMARKS[name]
    result = {"name": name, "what": benchmark.what, "unit": benchmark.unit,
              "ranks": RANKS, "backend": BACKEND["lockstep"],
              "python_backend": BACKEND["python"]}
    for side, rounds in sides.items():
        result[side] = {
            **{field: middle(rounds, field)
               for field in ("median", "p90_us", "cpu_us", "switches",
                             "memory_mib")
               if field in rounds[0]},
            "rounds": rounds}
    # Greater is better: how many times faster than the peer.
    add_ratio(result, "ratio", sides["python"], sides["lockstep"])
    if "without_communication" in sides:
        # Smaller is better: how many times a step without communication.
        add_ratio(result, "communication_ratio", sides["lockstep"],
                  sides["without_communication"])
        # Greater is better: what placing gradients saves.
        add_ratio(result, "copied_ratio", sides["copied"], sides["lockstep"])
        traces = [figures["trace"] for figures in sides["lockstep"]]
        result["waited_us"] = middle(traces, "waited_us")
        if all("hidden" in trace for trace in traces):
            result["hidden"] = middle(traces, "hidden")
    for field, target in benchmark.targets.items():
        is_met = (result[field] >= target["at_least"] if "at_least" in target
                  else result[field] <= target["at_most"])
        result.setdefault("targets", {})[field] = {**target, "met": is_met}
    return result


def middle(rounds, field):
    """Returns the median of the rounds' values, or of each of their parts."""
    values = [figures[field] for figures in rounds]
    if isinstance(values[0], dict):
        return {part: middle(values, part) for part in values[0]}
    return round(statistics.median(values), 4)


def add_ratio(result, name, over, under):
    # Divides within each round: what slows a machine for a while slows both
    # sides.
    by_round = [a["median"] / b["median"] for a, b in zip(over, under)]
    result[name] = round(statistics.median(by_round), 3)
    result[f"{name}_min"] = round(min(by_round), 3)
    result[f"{name}_max"] = round(max(by_round), 3)


def shown(value, unit):
    if unit == "s":
        return f"{value:.2f} s"
    return f"{value:.0f} us" if value < 10_000 else f"{value / 1000:.1f} ms"


def shown_times(result, side):
    """Returns two cells: the median, and what 90 % of the steps are below."""
    times = result[side]
    return [shown(times["median"], result["unit"]),
            shown(times["p90_us"], "us") if "p90_us" in times else "-"]


def shown_ratio(result, name):
    """Returns two cells: the ratio, with its range over rounds; the target."""
    if name not in result:
        return ["-", "-"]
    target = result.get("targets", {}).get(name)
    goal = "-"
    if target:
        goal = (f">= {target['at_least']:g}" if "at_least" in target
                else f"<= {target['at_most']:.2f}")
        goal += " met" if target["met"] else " MISSED"
    least, most = result[f"{name}_min"], result[f"{name}_max"]
    return [f"{result[name]:.2f} ({least:.2f}-{most:.2f})", goal]


def times_table(results):
    rows = []
    for r in results:
        alone = r.get("without_communication")
        rows.append([
            r["name"], *shown_times(r, "lockstep"), *shown_times(r, "python"),
            *shown_ratio(r, "ratio"),
            shown(alone["median"], r["unit"]) if alone else "-",
            *shown_ratio(r, "communication_ratio"),
            shown_ratio(r, "copied_ratio")[0]])
    return table(["benchmark", "ours", "p90", "Python", "p90", "Python / ours",
                  "target", "without communication", "ours / without",
                  "target", "copied / ours"], rows)


def resources_table(results):
    """Returns the table of the training steps; without any, an empty text."""
    sides = ("lockstep", "python", "without_communication")
    rows = []
    for r in results:
        if "memory_mib" not in r["lockstep"]:
            continue
        memory = [r[side]["memory_mib"] for side in sides]
        rows.append([r["name"],
                     *(f"{m['peak_rss']:.0f}" for m in memory),
                     *(f"{m['pss']:.0f}" for m in memory),
                     *(f"{r[side]['switches']:.1f}" for side in sides),
                     shown(r["waited_us"], "us"),
                     f"{r['hidden']:.0%}" if "hidden" in r else "-"])
    if not rows:
        return ""
    return table(["of a rank", "peak RSS: ours", "Python", "without",
                  "PSS: ours", "Python", "without",
                  "switches a step: ours", "Python", "without",
                  "ours waited", "hidden"], rows)


def table(header, rows):
    widths = [max(map(len, column)) for column in zip(header, *rows)]

    def line(cells):
        return "| " + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))) + " |"

    rule = "|" + "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
