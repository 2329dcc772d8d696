"""Measures how long a launcher takes for workers that do nothing: two times
`true`, from the start of the command to its end. Ours and torchrun
alternate. And how long many workers take to start, what the rendezvous of many
nodes costs our agents (rendezvous.cpp), how a job recovers (recovery.py) or heals
(healing.py), and whether it goes on while the network is cut (cuts.py)."""

import json
import pathlib
import statistics
import subprocess
import sys
import time

import cuts
import healing
import recovery
from processes import Failure, RANKS

FORMAT = 1
# The target in docs/compared.md.
TARGET_MS = 50
# Further targets: torchrun takes so many times as long; so many
# workers start and end in that time; so many agents meet in that time of a
# processor.
TARGET_RATIO = 50
MANY, MANY_TARGET_MS = 256, 1000
MEETING, MEETING_TARGET_MS = 64, 2000
RUNS = {"lockstep": 40, "torchrun": 2}  # in a round
AGENTS = (16, 64, 256)


def find_launchers(build):
    """Returns the program of each side. Raises Failure if one is missing."""
    launchers = {"lockstep": pathlib.Path(build) / "bin" / "lockstep",
                 "torchrun": pathlib.Path(sys.executable).parent / "torchrun"}
    for path, remedy in zip(launchers.values(), ("./dev build", "./dev setup")):
        if not path.exists():
            raise Failure(f"{path} is missing; run {remedy}")
    return {"lockstep": launchers["lockstep"].resolve(),
            "torchrun": launchers["torchrun"]}


def commands(launchers, workers):
    """Returns the command of each side for workers that do nothing."""
    options = ["--standalone", f"--nproc-per-node={workers}", "--no-python",
               "true"]
    return {"lockstep": [launchers["lockstep"], "run", *options],
            "torchrun": [launchers["torchrun"], *options]}


def run_ms(command):
    begin = time.monotonic()
    result = subprocess.run(command, stdin=subprocess.DEVNULL,
                            capture_output=True, timeout=120, check=False)
    if result.returncode != 0:
        raise Failure(f"failed with exit code {result.returncode}: "
                      f"{' '.join(map(str, command))}",
                      result.stderr.decode(errors="replace"), is_of_child=True)
    return (time.monotonic() - begin) * 1000


def measure(build, rounds, quick, progress):
    """Returns summarise() of the milliseconds of every run of every round."""
    launchers = find_launchers(build)
    programs = pathlib.Path(build).resolve() / "bin" / "benchmarks"
    sides = commands(launchers, RANKS)
    many = commands(launchers, MANY)["lockstep"]
    torchft = None if quick else healing.torchft_packages(
        build, lambda line: print(line, file=sys.stderr))
    for command in sides.values():
        run_ms(command)  # loads the program from the disk
    figures, many_ms, recoveries, healings = [], [], [], []
    for number in range(rounds):
        progress(f"launch: round {number + 1} of {rounds}")
        figures.append({side: [run_ms(command) for _ in
                               range(1 if quick else RUNS[side])]
                        for side, command in sides.items()})
        many_ms.append(run_ms(many))
        progress(f"recovery: round {number + 1} of {rounds}")
        recoveries.append(recovery.measure_round(
            launchers, programs / "recovery", quick))
        progress(f"healing: round {number + 1} of {rounds}")
        healings.append(healing.measure_round(
            launchers, programs / "healing", torchft, quick))
    progress("launch: rendezvous")
    agents = measure_rendezvous(build, AGENTS[:1] if quick else AGENTS)
    cut = cuts.measure(launchers, quick, progress)
    progress("")
    return {**summarise(figures), "rendezvous": agents, "cuts": cut,
            "healing": healing.summarise(healings),
            "many": {"workers": MANY, "ms": statistics.median(many_ms),
                     "round_ms": many_ms},
            "recovery": {side: {"ms": statistics.median(values),
                                "round_ms": values}
                         for side in recoveries[0]
                         for values in [[one[side] for one in recoveries]]}}


def measure_rendezvous(build, agents):
    """Returns the figures of rendezvous.cpp for each number of agents."""
    program = pathlib.Path(build) / "bin" / "benchmarks" / "rendezvous"
    result = subprocess.run([program, *map(str, agents)], capture_output=True,
                            timeout=300, check=False, text=True)
    if result.returncode != 0:
        raise Failure(f"{program} failed with exit code {result.returncode}",
                      result.stderr, is_of_child=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def summarise(figures):
    """Returns, for each side, the median over all runs and the medians of the
    rounds; and the ratio of the medians."""
    sides = {}
    for side in RUNS:
        medians = [statistics.median(one[side]) for one in figures]
        sides[side] = {
            "ms": statistics.median(ms for one in figures for ms in one[side]),
            "round_ms": medians}
    ours, theirs = sides["lockstep"]["ms"], sides["torchrun"]["ms"]
    return {"sides": sides, "ratio": theirs / ours, "target_ms": TARGET_MS,
            "target_met": ours < TARGET_MS, "runs": figures}


def range_row(name, figures, more=""):
    low, high = min(figures["round_ms"]), max(figures["round_ms"])
    return (f"| {name} | {figures['ms']:.1f} ms | {low:.1f}–{high:.1f} ms |"
            f"{more}")


def targets(results):
    """Returns what is to be reached, what was, and whether that is enough, of
    all that was measured."""
    rows = [(f"{RANKS} × true: times as fast as torchrun", TARGET_RATIO,
             results["ratio"], results["ratio"] >= TARGET_RATIO),
            (f"{MANY} × true: ms", MANY_TARGET_MS, results["many"]["ms"],
             results["many"]["ms"] <= MANY_TARGET_MS)]
    times = results["recovery"]
    for side, target in recovery.TARGETS.items():
        if "torchrun" in times:
            ratio = times["torchrun"]["ms"] / times[side]["ms"]
            rows.append((f"recovery by {side}: times as fast as torchrun",
                         target, ratio, ratio >= target))
    longest = max(times["left"]["round_ms"])
    rows.append(("the last process after SIGKILL of the launcher: ms, longest",
                 recovery.LEFT_TARGET_S * 1000, longest,
                 longest <= recovery.LEFT_TARGET_S * 1000))
    for one in results["rendezvous"]:
        if one["agents"] == MEETING:
            rows.append((f"rendezvous of {MEETING} agents: ms of a processor",
                         MEETING_TARGET_MS, one["cpu_ms"],
                         one["cpu_ms"] <= MEETING_TARGET_MS))
    return (rows + healing.targets(results["healing"]) +
            cuts.targets(results["cuts"]))


def table(results):
    rows = ["| launcher | median | medians of the rounds |",
            "| --- | ---: | ---: |"]
    rows += [range_row(side, figures)
             for side, figures in results["sides"].items()]
    rows.append(range_row(f"lockstep, {MANY} workers", results["many"]))
    met = "met" if results["target_met"] else "MISSED"
    rows.append(f"\nratio {results['ratio']:.0f}×; target under "
                f"{results['target_ms']} ms: {met}")
    rows += ["", "| from SIGKILL of a rank to the next all-reduce | median | "
             "rounds |", "| --- | ---: | ---: |"]
    rows += [range_row(side, figures)
             for side, figures in results["recovery"].items() if side != "left"]
    rows += ["", *healing.table(results["healing"])]
    rows += ["", "| rendezvous of agents | until all have a plan | processor "
             "time, all | each |", "| ---: | ---: | ---: | ---: |"]
    for one in results["rendezvous"]:
        rows.append(f"| {one['agents']} | {one['plan_ms']:.0f} ms | "
                    f"{one['cpu_ms']:.0f} ms | "
                    f"{one['cpu_ms'] / one['agents']:.1f} ms |")
    rows += ["", *cuts.table(results["cuts"])]
    rows += ["", "| to be reached | target | measured | |",
             "| --- | ---: | ---: | --- |"]
    rows += [f"| {name} | {target} | {value:.1f} | "
             f"{'met' if reached else 'MISSED'} |"
             for name, target, value, reached in targets(results)]
    return "\n".join(rows)
