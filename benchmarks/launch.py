"""Measures how long a launcher takes for workers that do nothing: two times
`true`, from the start of the command to its end. Ours and torchrun
alternate. And what the rendezvous of many nodes costs our agents
(rendezvous.cpp)."""

import json
import pathlib
import statistics
import subprocess
import sys
import time

from processes import Failure, RANKS

FORMAT = 1
# What README promises.
TARGET_MS = 50
RUNS = {"lockstep": 40, "torchrun": 2}  # in a round
AGENTS = (16, 64, 256)


def commands(build):
    """Returns the command of each side. Raises Failure if one is missing."""
    launchers = {"lockstep": pathlib.Path(build) / "bin" / "lockstep",
                 "torchrun": pathlib.Path(sys.executable).parent / "torchrun"}
    for path, remedy in zip(launchers.values(), ("./dev build", "./dev setup")):
        if not path.exists():
            raise Failure(f"{path} is missing; run {remedy}")
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--no-python",
               "true"]
    return {"lockstep": [launchers["lockstep"].resolve(), "run", *options],
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
    sides = commands(build)
    for command in sides.values():
        run_ms(command)  # loads the program from the disk
    figures = []
    for number in range(rounds):
        progress(f"launch: round {number + 1} of {rounds}")
        figures.append({side: [run_ms(command) for _ in
                               range(1 if quick else RUNS[side])]
                        for side, command in sides.items()})
    progress("launch: rendezvous")
    agents = measure_rendezvous(build, AGENTS[:1] if quick else AGENTS)
    progress("")
    return {**summarise(figures), "rendezvous": agents}


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


def table(results):
    rows = ["| launcher | median | medians of the rounds |",
            "| --- | ---: | ---: |"]
    for side, figures in results["sides"].items():
        low, high = min(figures["round_ms"]), max(figures["round_ms"])
        rows.append(f"| {side} | {figures['ms']:.1f} ms | "
                    f"{low:.1f}–{high:.1f} ms |")
    met = "met" if results["target_met"] else "MISSED"
    rows.append(f"\nratio {results['ratio']:.0f}×; target under "
                f"{results['target_ms']} ms: {met}")
    rows += ["", "| rendezvous of agents | until all have a plan | processor "
             "time, all | each |", "| ---: | ---: | ---: | ---: |"]
    for one in results["rendezvous"]:
        rows.append(f"| {one['agents']} | {one['plan_ms']:.0f} ms | "
                    f"{one['cpu_ms']:.0f} ms | "
                    f"{one['cpu_ms'] / one['agents']:.1f} ms |")
    return "\n".join(rows)
