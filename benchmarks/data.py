"""What a loader delivers: ours beside LibTorch's own and Python's, over the same
samples, in loops that do nothing with the batches."""

import dataclasses
import json
import statistics
import sys

from processes import Failure, PEERS, run_child

FORMAT = 1
QUICK_SHARE = 10


@dataclasses.dataclass
class Side:
    """One loader, and how many epochs it makes in a round."""

    name: str
    epochs: int
    # The target: samples per second of ours, divided by those of this side.
    faster: float = None


@dataclasses.dataclass
class Workload:
    """What is loaded, and by whom; ours is the first side."""

    name: str
    workers: int
    sides: list


WORKLOADS = [
    Workload("tutorial", 0, [Side("lockstep", 2000), Side("python", 40, 4),
                             Side("libtorch", 100, 2),
                             Side("libtorch_batches", 1000)]),
    Workload("images", 2, [Side("lockstep", 12), Side("python", 12, 1),
                           Side("libtorch", 12)]),
]


def run_side(workload, side, place):
    epochs = max(2, side.epochs // QUICK_SHARE) if place.quick else side.epochs
    arguments = ["--workload", workload.name, "--workers", workload.workers,
                 "--epochs", epochs, "--warmup", max(1, epochs // 10)]
    if side.name == "python":
        command = [sys.executable, PEERS / "data_peer.py", *arguments]
    else:
        program = place.programs.build / "bin" / "benchmarks" / "data_loader"
        command = place.programs.existing(
            program, "./dev build", [program, "--side", side.name, *arguments])
    command = list(map(str, command))
    stdout, _ = run_child(command, place.scratch)
    for line in stdout.splitlines():
        try:
            figures = json.loads(line)
            seconds = statistics.median(figures["seconds"])
            return {"samples_per_second": figures["samples"] / seconds,
                    "seconds_per_epoch": seconds, "epochs": epochs}
        except (ValueError, KeyError, TypeError):
            continue  # a library's line
    raise Failure(f"printed no figures: {' '.join(command)}", stdout)


def measure(rounds, place, progress):
    """Returns one entry for each workload, with the figures of every round."""
    results = []
    for workload in WORKLOADS:
        entries = [{"name": side.name, "rounds": []} for side in workload.sides]
        for round_ in range(rounds):
            pairs = list(zip(workload.sides, entries))
            first = round_ % len(pairs)
            for side, entry in pairs[first:] + pairs[:first]:
                progress(f"data: {workload.name}, round {round_ + 1}/{rounds}, "
                         f"{side.name}")
                entry["rounds"].append(run_side(workload, side, place))
        results.append(summarise(workload, entries))
    progress("")
    return results


def summarise(workload, entries):
    ours = entries[0]
    for side, entry in zip(workload.sides, entries):
        rates = [one["samples_per_second"] for one in entry["rounds"]]
        entry["samples_per_second"] = round(statistics.median(rates))
        if entry is ours:
            continue
        by_round = [a["samples_per_second"] / b["samples_per_second"]
                    for a, b in zip(ours["rounds"], entry["rounds"])]
        entry["ratio"] = round(statistics.median(by_round), 2)
        entry["ratio_min"] = round(min(by_round), 2)
        entry["ratio_max"] = round(max(by_round), 2)
        if side.faster is not None:
            entry["target"] = side.faster
            entry["target_met"] = entry["ratio"] >= side.faster
    return {"name": workload.name, "workers": workload.workers,
            "sides": entries}


def table(results):
    lines = ["| workload | loader | samples/s | ours / this | of the rounds | "
             "target |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for one in results:
        for entry in one["sides"]:
            ratio, rounds, target = "", "", ""
            if "ratio" in entry:
                ratio = f"{entry['ratio']:.1f}"
                rounds = f"{entry['ratio_min']:.1f}-{entry['ratio_max']:.1f}"
            if "target" in entry:
                target = (f">= {entry['target']} "
                          f"{'met' if entry['target_met'] else 'MISSED'}")
            lines.append(f"| {one['name']} | {entry['name']} | "
                         f"{entry['samples_per_second']:,} | {ratio} | "
                         f"{rounds} | {target} |")
    return "\n".join(lines)
