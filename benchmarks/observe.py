"""What it costs to watch a training: each way beside the same steps without
it, in one process (observe.cpp)."""

import json
import statistics

from processes import Failure, RANKS, run_child

FORMAT = 1
MODELS = {"mlp": 100, "transformer": 20}  # and the steps of a block
BLOCKS = 6  # of each way, in a round
# The target: at most this part of a step.
TARGET = 1.01
# Not on by default, so without a target.
WITHOUT_TARGET = {"profiler"}


def run_once(model, steps, place):
    programs = place.programs
    program = programs.build / "bin" / "benchmarks" / "observe"
    folder = place.scratch / "observe"
    folder.mkdir(exist_ok=True)
    command = programs.existing(
        program, "./dev build",
        [programs.build / "bin" / "lockstep", "run", "--standalone",
         f"--nproc-per-node={RANKS}", program, "--model", model,
         "--folder", folder, "--steps", steps,
         "--blocks", 1 if place.quick else BLOCKS])
    stdout, _ = run_child(command, place.scratch)
    for line in stdout.splitlines():
        try:
            return json.loads(line)["block_us"]
        except (ValueError, KeyError, TypeError):
            continue  # a library's line
    raise Failure(f"printed no figures: {' '.join(map(str, command))}", stdout)


def measure(rounds, place, progress):
    """Returns one entry for each model, with the blocks of every round."""
    results = []
    for model, steps in MODELS.items():
        figures = []
        for number in range(rounds):
            progress(f"observe: {model}, round {number + 1}/{rounds}")
            figures.append(run_once(model, steps, place))
        results.append(summarise(model, steps, figures))
    progress("")
    return results


def summarise(model, steps, figures):
    """`figures`: for each round, the microseconds of each way's blocks."""
    plain = "nothing"
    ways = {}
    for way in figures[0]:
        by_block = [watched / alone for one in figures
                    for watched, alone in zip(one[way], one[plain])]
        ways[way] = {
            "step_us": round(statistics.median(
                us for one in figures for us in one[way]) / steps, 2)}
        if way == plain:
            continue
        ways[way]["ratio"] = round(statistics.median(by_block), 4)
        ways[way]["quartiles"] = [round(value, 4) for value in (
            statistics.quantiles(by_block, n=4)[::2] if len(by_block) > 1
            else by_block * 2)]
        if way not in WITHOUT_TARGET:
            ways[way]["target"] = TARGET
            ways[way]["target_met"] = ways[way]["ratio"] <= TARGET
    return {"model": model, "steps": steps, "ways": ways, "blocks_us": figures}


def table(results):
    lines = ["| model | way | a step | beside nothing | quartiles | target |",
             "| --- | --- | ---: | ---: | ---: | ---: |"]
    for one in results:
        for way, entry in one["ways"].items():
            ratio, quartiles, target = "", "", ""
            if "ratio" in entry:
                ratio = f"{entry['ratio']:.3f}"
                quartiles = "–".join(f"{q:.3f}" for q in entry["quartiles"])
            if "target" in entry:
                met = "met" if entry["target_met"] else "MISSED"
                target = f"<= {entry['target']} {met}"
            lines.append(f"| {one['model']} | {way} | {entry['step_us']:,} us | "
                         f"{ratio} | {quartiles} | {target} |")
    return "\n".join(lines)
