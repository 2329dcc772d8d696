"""What one host gains by ranks: the same program at the same global batch, in
one process with a thread for each core, and as ranks of one or more threads."""

import dataclasses
import json
import os
import statistics

from processes import Failure, run_child

FORMAT = 1
QUICK_SHARE = 10


@dataclasses.dataclass
class Model:
    """A model of ddp_step, and what its ranks shall reach."""

    model: str
    batch: int     # samples for each core
    optimizer: str
    steps: int
    # The target: the time of the best single process, divided by that of the
    # best ranks; both with the same fused optimizer.
    faster: float


MODELS = {
    "tutorial": Model("tutorial", 32, "sgd", 4000, 1 / 1.2),
    "mlp": Model("mlp", 32, "sgd", 60, None),
    "mlp_adamw": Model("mlp", 32, "adamw", 60, 0.9),
    "narrow": Model("narrow", 32, "sgd", 400, 1.05),
    "transformer": Model("transformer", 1, "adamw", 100, 1.05),
    "transformer_4": Model("transformer", 4, "adamw", 40, 1.1),
    "digits": Model("digits", 64, "adamw", 200, 1.05),
}


@dataclasses.dataclass
class Side:
    """One way to use all cores."""

    name: str
    ranks: int
    threads: int  # of each rank
    options: tuple = ()

    @property
    def is_one_process(self):
        return self.ranks == 1


# Ranks with torch::optim beside one process with it: the target of the same
# ratio.
PLAIN = 1.0


def sides(cores):
    """Returns the ways to use `cores`, those of one process first."""
    result = [Side("unfused", 1, cores, ("--no-ddp", "--unfused")),
              Side("fused", 1, cores, ("--no-ddp",)),
              Side("one thread", 1, 1, ("--no-ddp",))]
    for ranks in range(2, cores + 1):
        if cores % ranks != 0:
            continue
        threads = cores // ranks
        if ranks == cores:
            result.append(Side("unfused", ranks, threads, ("--unfused",)))
        result += [Side("fused", ranks, threads),
                   Side("sharded", ranks, threads, ("--zero",))]
    return result


def run_side(model, side, cores, place):
    steps = max(5, model.steps // QUICK_SHARE) if place.quick else model.steps
    arguments = ["--model", model.model, "--optimizer", model.optimizer,
                 "--steps", steps, "--warmup", max(3, steps // 5),
                 "--batch-size", model.batch * cores // side.ranks,
                 "--threads", side.threads, *side.options]
    command = place.programs.lockstep("benchmarks/ddp_step", *arguments,
                                      ranks=side.ranks)
    stdout, _ = run_child(command, place.scratch, threads=side.threads)
    for line in stdout.splitlines():
        try:
            figures = json.loads(line)
            return {"p50": figures["median_us"], "p90": figures["p90_us"],
                    **figures}
        except (ValueError, KeyError, TypeError):
            continue  # a library's line
    raise Failure(f"printed no figures: {' '.join(command)}", stdout)


def measure(rounds, place, progress):
    """Returns one entry for each model, with the figures of every round."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise Failure("threads compares ways to use several cores; "
                      "this process may use one")
    results = []
    for name, model in MODELS.items():
        entries = [{"name": side.name, "ranks": side.ranks,
                    "threads": side.threads, "rounds": []}
                   for side in sides(cores)]
        for round_ in range(rounds):
            pairs = list(zip(sides(cores), entries))
            first = round_ % len(pairs)
            for side, entry in pairs[first:] + pairs[:first]:
                progress(f"threads: {name}, round {round_ + 1}/{rounds}, "
                         f"{side.ranks} x {side.threads} {side.name}")
                entry["rounds"].append(run_side(model, side, cores, place))
        results.append(summarise(name, model, entries))
    progress("")
    return results


def summarise(name, model, entries):
    for entry in entries:
        for figure in ("p50", "p90"):
            entry[figure] = round(statistics.median(
                one[figure] for one in entry["rounds"]), 2)
    # The same fused optimizer on both sides.
    fused = [entry for entry in entries if entry["name"] != "unfused"]
    alone = min((e for e in fused if e["ranks"] == 1), key=lambda e: e["p50"])
    ranks = min((e for e in fused if e["ranks"] > 1), key=lambda e: e["p50"])
    by_round = ratios(alone, ranks)
    # As programs are written first: the one process with torch::optim, the ranks
    # with it, and the ranks with lockstep::optim, as in the README.
    [plain_process, plain_ranks] = [e for e in entries if e["name"] == "unfused"]
    [readme] = [e for e in entries if e["name"] == "fused"
                and e["ranks"] == plain_ranks["ranks"]]
    plain = ratios(plain_process, plain_ranks)
    result = {"name": name, "model": model.model,
              "optimizer": model.optimizer, "batch_per_core": model.batch,
              "sides": entries, "best_process": shape(alone),
              "best_ranks": shape(ranks),
              "ratio": round(statistics.median(by_round), 3),
              "ratio_min": round(min(by_round), 3),
              "ratio_max": round(max(by_round), 3),
              "plain": round(statistics.median(plain), 3),
              "plain_min": round(min(plain), 3),
              "plain_max": round(max(plain), 3),
              "plain_target": PLAIN,
              "plain_target_met": statistics.median(plain) >= PLAIN,
              "readme": round(statistics.median(
                  ratios(plain_process, readme)), 3)}
    if model.faster is not None:
        result["target"] = round(model.faster, 3)
        result["target_met"] = result["ratio"] >= model.faster
    return result


def ratios(process, ranks):
    return [a["p50"] / b["p50"]
            for a, b in zip(process["rounds"], ranks["rounds"])]


def shape(entry):
    return f"{entry['ranks']} x {entry['threads']} {entry['name']}"


def table(results):
    """Returns three tables: every way to use the cores; the best of each kind;
    ways of writing that users begin with."""
    header = ["p50 / p90"] + [shape(e) for e in results[0]["sides"]]
    lines = [row(header), "| --- |" + " ---: |" * (len(header) - 1)]
    for one in results:
        lines.append(row([one["name"]] + [
            f"{shown(e['p50'])} / {shown(e['p90'])}" for e in one["sides"]]))
    lines += ["", row(["model", "best process", "best ranks",
                       "process / ranks", "of the rounds", "target"]),
              "| --- | --- | --- | ---: | ---: | ---: |"]
    for one in results:
        target = "-"
        if "target" in one:
            target = (f">= {one['target']:.2f} "
                      f"{'met' if one['target_met'] else 'MISSED'}")
        lines.append(row([
            one["name"], one["best_process"], one["best_ranks"],
            f"{one['ratio']:.2f}",
            f"{one['ratio_min']:.2f}-{one['ratio_max']:.2f}", target]))
    lines += ["", row(["model", "torch::optim: process / ranks",
                       "of the rounds", "target",
                       "process with torch::optim / ranks as in the README"]),
              "| --- | ---: | ---: | ---: | ---: |"]
    for one in results:
        lines.append(row([
            one["name"], f"{one['plain']:.2f}",
            f"{one['plain_min']:.2f}-{one['plain_max']:.2f}",
            f">= {one['plain_target']:.2f} "
            f"{'met' if one['plain_target_met'] else 'MISSED'}",
            f"{one['readme']:.2f}"]))
    return "\n".join(lines)


def row(cells):
    return "| " + " | ".join(cells) + " |"


def shown(us):
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.2f} ms"
