"""What can be counted of parallel training, compared with formulas.

Memory of a rank against Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (SC 2020), section 5; bytes of a step as the
flight recorder has them, exactly; the same by dry_run(); the bubble of
pipelines; and the schedules against PyTorch's, action by action.

    python3 tests/proof/counts.py [--build build] [--exact] [--quick]

prints Markdown and ends with exit code 1 if something is not as it must be.
--exact leaves out what takes time or needs Python's torch: that is the form
which the tests run. The formulas here are written down once more, and share
nothing with dry_run().
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

TIMEOUT_S = 240
FLOAT = 4
LINE = 16  # floats of a cache line, to which parts are padded
WITHIN = 0.15


class Failure(Exception):
    """Something could not be counted: one line, and what was printed."""


def run(build, ranks, cases):
    """Returns what proof_counts prints for each of `cases`."""
    command = [build / "bin" / "lockstep", "run", "--standalone",
               f"--nproc-per-node={ranks}",
               build / "bin" / "tests" / "proof_counts", json.dumps(cases)]
    environment = dict(os.environ, OMP_NUM_THREADS="1",
                       LOCKSTEP_FLIGHT_RECORDS="4096")
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True,
                              text=True, timeout=TIMEOUT_S, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"proof_counts: {error}") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != len(cases):
        raise Failure(f"proof_counts failed with exit code {done.returncode}\n"
                      + done.stdout + done.stderr)
    return [json.loads(line) for line in lines]


def run_all(build, cases):
    """Runs `cases`, those of one world together, and returns their results in
    the same order."""
    results = [None] * len(cases)
    for ranks in sorted({world(case) for case in cases}):
        places = [i for i, case in enumerate(cases) if world(case) == ranks]
        found = run(build, ranks, [cases[i] for i in places])
        for i, result in zip(places, found):
            results[i] = result
    return results


def world(case):
    size = 1
    for _, ranks in case["axes"]:
        size *= ranks
    return size


def axis(case, name):
    return dict(case["axes"]).get(name, 1)


def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


# ---- The parameters of the towers ----


def block(case):
    """Returns the elements of each parameter of a block."""
    width = case["width"]
    return [width * width] + ([width] if case["bias"] else [])


def padded(parameters, ranks):
    """Returns the elements of a unit of FullyShard: each parameter begins on a
    cache line, and all ranks have equal slices of whole cache lines."""
    count = sum(round_up(one, LINE) for one in parameters)
    return round_up(-(-count // ranks), LINE) * ranks


# ---- Bytes of one step: (axis, operation) -> [calls, bytes], by rank ----


def add(rows, where, operation, calls, size):
    if calls > 0:
        row = rows.setdefault((where, operation), [0, 0])
        row[0] += calls
        row[1] += size


def replicated_bytes(case):
    """Returns what a DistributedDataParallel, with or without a
    ZeroRedundancyOptimizer, sends."""
    name, ranks = case["axes"][0]
    parameters = block(case) * case["blocks"]
    everything = sum(parameters) * FLOAT
    rows = {}
    if ranks == 1:
        return [rows]
    if case["backend"] == "lockstep":
        # One reduction of all buckets in shared memory, and one copy of the
        # parameters.
        add(rows, name, "reduce_buckets", 1, everything)
        return [rows] * ranks
    # A bucket is full when it has reached its size.
    buckets, filled = 0, 0
    for one in reversed(parameters):
        filled += one * FLOAT
        if filled >= case["bucket_mb"] * 2**20:
            buckets, filled = buckets + 1, 0
    add(rows, name, "all_reduce", buckets + (filled > 0), everything)
    if case["zero_stage"] == 1:
        # Large parameters are cut and gathered where they are. Small ones go to
        # the rank that has least, and travel together; each begins on a cache
        # line, and all ranks send as much as the one that has most.
        cut = [one for one in parameters if one // ranks >= 4096]
        assert all(one % (64 * ranks) == 0 for one in cut)
        add(rows, name, "all_gather_into_tensor", len(cut), sum(cut) * FLOAT)
        owned, sent = [0] * ranks, [0] * ranks
        for one in sorted((p for p in parameters if p // ranks < 4096),
                          reverse=True):
            owner = owned.index(min(owned))
            owned[owner] += one * FLOAT
            sent[owner] += round_up(one * FLOAT, 64)
        add(rows, name, "all_gather_into_tensor", max(sent) > 0,
            ranks * max(sent))
    return [rows] * ranks


# An Agreement, which gathers a failure, a digest, and numbers that it tells.
AGREEMENT = "agreement"


# FullyShard compares the order of units, and tells what the ranks used, by a
# bit for each parameter, 63 in a word.
def comparison_bytes(case):
    units = case["blocks"] + (1 if case.get("head") else 0)
    return 16 + 8 * -(-units * len(block(case)) // 63)


def sharded_bytes(case):
    ranks, copies = axis(case, "shard"), axis(case, "data")
    units = [padded(block(case), ranks) * FLOAT] * case["blocks"]
    head = [padded(block(case), ranks) * FLOAT] if case.get("head") else []
    rows = {}
    if ranks > 1:
        if not (case["backend"] == "lockstep" and case["shared"]):
            again = units if case["zero_stage"] == 3 else []
            if case["zero_stage"] == 3 and case.get("root_reshards", True):
                again = again + head
            gathered = units + head
            if case.get("neighbours", ranks) == ranks:
                gathered = gathered + again
            else:
                add(rows, "part of shard", "all_gather_into_tensor", len(again),
                    sum(again))
            add(rows, "shard", "all_gather_into_tensor", len(gathered),
                sum(gathered))
            add(rows, "shard", AGREEMENT, 1, comparison_bytes(case) * ranks)
        reduced = ("reduce_buckets" if case["backend"] == "lockstep"
                   else "reduce_scatter_tensor")
        add(rows, "shard", reduced, len(units + head), sum(units + head))
    if copies > 1:
        add(rows, "data", "all_reduce", len(units + head),
            sum(units + head) // ranks)
        add(rows, "data", AGREEMENT, 1, comparison_bytes(case) * copies)
    return [rows] * world(case)


def tensor_bytes(case):
    ranks, layers, hidden = axis(case, "tensor"), case["layers"], case["hidden"]
    activations = case["batch"] * case["sequence"] * hidden * FLOAT
    rows = {}
    crossings = 4 * layers  # attention and MLP, forward and backward
    if case["sequence_parallel"]:
        add(rows, "tensor", "all_gather_into_tensor", crossings,
            crossings * activations)
        add(rows, "tensor", "reduce_scatter_tensor", crossings,
            crossings * activations)
        # The biases of the two row-parallel layers; weight and bias of two
        # norms.
        add(rows, "tensor", "all_reduce", 2 * layers,
            2 * layers * hidden * FLOAT)
        add(rows, "tensor", "all_reduce_coalesced", 2 * layers,
            2 * layers * 2 * hidden * FLOAT)
    else:
        add(rows, "tensor", "all_reduce", crossings, crossings * activations)
    return [rows] * ranks


def rank_of_stage(case, stage):
    ranks = axis(case, "pipeline")
    if case["schedule"] == "ZBVZeroBubble":
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


# Before the gradient of a stage's input: whether it has one.
PRESENCE = 8


def pipeline_bytes(case):
    ranks, count = axis(case, "pipeline"), case["micro_batches"]
    message = case["rows"] * case["hidden"] * FLOAT
    rows = [{} for _ in range(ranks)]
    for stage in range(ranks * case["stages_per_rank"] - 1):
        one, other = rank_of_stage(case, stage), rank_of_stage(case, stage + 1)
        if one == other:
            continue
        for sender, receiver in ((one, other), (other, one)):
            add(rows[sender], "pipeline", "isend", count, count * message)
            add(rows[receiver], "pipeline", "irecv", count, count * message)
        add(rows[other], "pipeline", "isend", count, count * PRESENCE)
        add(rows[one], "pipeline", "irecv", count, count * PRESENCE)
    for each in rows:
        # Tells 3 numbers, and one for each micro-batch.
        add(each, "pipeline", AGREEMENT, 1, ranks * (5 + count) * 8)
    return rows


def ring_bytes(case):
    ranks, layers = axis(case, "context"), case["layers"]
    block_bytes = (2 * case["batch"] * case["heads"] * case["sequence"] // ranks
                   * case["head_dim"] * FLOAT)
    # How far the keys and values of each rank travel: to all that use them.
    hops = [ranks - 1 - source if case["causal"] else ranks - 1
            for source in range(ranks)]
    rows = [{} for _ in range(ranks)]
    for source, far in enumerate(hops):
        # Forward and backward, and gradients from the second pass on.
        for _, hop in itertools.product(range(3), range(far)):
            sender = (source + hop) % ranks
            add(rows[sender], "context", "isend", layers, layers * block_bytes)
            add(rows[(sender + 1) % ranks], "context", "irecv", layers,
                layers * block_bytes)
        if far > 0:  # the sum of the gradients goes home
            add(rows[(source + far) % ranks], "context", "isend", layers,
                layers * block_bytes)
            add(rows[source], "context", "irecv", layers, layers * block_bytes)
    for each in rows:
        # Tells two numbers.
        add(each, "context", AGREEMENT, layers, layers * ranks * 4 * 8)
    return rows


EXPECTED = {"replicated": replicated_bytes, "sharded": sharded_bytes,
            "tensor": tensor_bytes, "pipeline": pipeline_bytes,
            "ring": ring_bytes}

TOWER = {"blocks": 6, "width": 128, "bias": False}
UNEVEN = {"blocks": 3, "width": 37, "bias": True}  # parts must be padded


def of_dry_run(case, **model):
    return dict(case, model=model)


def tower_cases():
    """Yields name and case of trainings that divide parameters."""
    for ranks in (2, 4):
        for backend, shared in (("gloo", False), ("lockstep", True)):
            where = {"backend": backend, "shared": shared}
            path = "one copy in shared memory" if shared else "Gloo"
            for stage in (0, 1):
                name = ("DistributedDataParallel" if stage == 0 else
                        "ZeroRedundancyOptimizer (ZeRO-1)") + ", " + path
                for tower, bucket, what in (
                        (TOWER, 25, ""), (TOWER, 0.0625, ", small buckets"),
                        (UNEVEN, 25, ", padded")):
                    case = dict(tower, kind="replicated", zero_stage=stage,
                                bucket_mb=bucket, **where,
                                axes=[["shard" if stage else "data", ranks]])
                    # dry_run() has as many gathers as buckets.
                    if not shared and (bucket < 25 or stage == 0) and not what:
                        case = of_dry_run(case, zero_stage=stage,
                                          parameters=parameters_of(case))
                    elif not shared and bucket < 25:
                        case = of_dry_run(case, zero_stage=stage,
                                          units=case["blocks"],
                                          parameters=parameters_of(case))
                    yield name + what, case
            for stage in (2, 3):
                name = f"FullyShard (ZeRO-{stage}), {path}"
                case = dict(TOWER, kind="sharded", zero_stage=stage, **where,
                            axes=[["shard", ranks]])
                exact = case if shared else of_dry_run(
                    case, zero_stage=stage, units=case["blocks"],
                    parameters=parameters_of(case))
                yield name, exact
                yield name + ", padded", dict(case, **UNEVEN)
                yield name + ", outermost unit kept", dict(
                    case, head=True, root_reshards=False)
    for backend, path in (("gloo", "Gloo"),
                          ("lockstep", "gathered in shared memory")):
        for root_reshards, what in ((True, ""),
                                    (False, ", outermost unit kept")):
            yield (f"FullyShard, backward gathers from 2 of 4 ranks, {path}" +
                   what,
                   dict(UNEVEN, kind="sharded", zero_stage=3, backend=backend,
                        shared=False, head=True, root_reshards=root_reshards,
                        neighbours=2, axes=[["shard", 4]]))
    for stage in (2, 3):
        case = dict(TOWER, kind="sharded", zero_stage=stage, backend="gloo",
                    shared=False, axes=[["data", 2], ["shard", 2]])
        yield f"FullyShard (ZeRO-{stage}), hybrid, Gloo", of_dry_run(
            case, zero_stage=stage, units=case["blocks"],
            parameters=parameters_of(case))
        yield f"FullyShard (ZeRO-{stage}), hybrid, Gloo, padded", dict(
            case, **UNEVEN)


def parameters_of(case):
    return sum(block(case)) * case["blocks"]


def activation_cases():
    """Yields name and case of trainings that divide layers or tokens."""
    for ranks in (2, 4):
        for sequence in (False, True):
            case = {"kind": "tensor", "backend": "gloo", "layers": 3,
                    "hidden": 32, "heads": 4, "batch": 2, "sequence": 8,
                    "axes": [["tensor", ranks]], "sequence_parallel": sequence}
            yield ("sequence parallel" if sequence else "tensor parallel",
                   of_dry_run(case, parameters=1, layers=3, hidden=32,
                              sequence=8, micro_batch=2,
                              sequence_parallel=sequence))
        for schedule, stages in (("GPipe", 1), ("1F1B", 1),
                                 ("Interleaved1F1B", 2),
                                 ("InterleavedZeroBubble", 2),
                                 ("ZBVZeroBubble", 2)):
            case = {"kind": "pipeline", "backend": "gloo", "hidden": 32,
                    "schedule": schedule, "micro_batches": 8, "rows": 3,
                    "stages_per_rank": stages, "axes": [["pipeline", ranks]]}
            if stages == 1:
                case = of_dry_run(case, parameters=1, layers=ranks, hidden=32,
                                  sequence=1, micro_batch=3, micro_batches=8)
            yield f"pipeline, {schedule}", case
        for causal in (False, True):
            case = {"kind": "ring", "backend": "gloo", "layers": 3, "heads": 4,
                    "batch": 2, "sequence": 8, "head_dim": 8, "causal": causal,
                    "axes": [["context", ranks]]}
            if not causal:
                case = of_dry_run(case, parameters=1, layers=3, hidden=32,
                                  sequence=8, micro_batch=2)
            yield ("ring attention" + (", causal" if causal else ""), case)


def counted_rows(rank):
    return {(where, operation): [calls, size]
            for where, operation, calls, size in rank["calls"]}


def dry_rows(case, result):
    """Returns dry_run()'s rows; of those in which only activations travel, not
    the gradients of the parameters, which the case does not have."""
    rows = {}
    for where, operation, calls, size, what in result["dry_run"]["traffic"]:
        if case["kind"] == "ring" and what == "gradients":
            continue
        add(rows, where, operation, calls, size)
    return rows


def seen_by_dry_run(case, ranks):
    """Returns the counted rows that dry_run() computes: it has a stage in the
    middle, counts a message where it is sent, and leaves agreements out."""
    rank = 1 if len(ranks) > 2 else 0
    rows = counted_rows(ranks[rank])
    if case["kind"] in ("pipeline", "ring"):
        rows = {key: row for key, row in rows.items() if key[1] == "isend"}
        if case["kind"] == "pipeline" and rank > 0:
            count = case["micro_batches"]
            for key, (calls, size) in rows.items():
                rows[key] = [calls - count, size - count * PRESENCE]
        return rows
    return {key: row for key, row in rows.items() if key[1] != AGREEMENT}


def thousands(number):
    return f"{number:,}"


def summary(rows):
    """Returns the rows of one rank as text."""
    if not rows:
        return "nothing"
    return "; ".join(
        operation + (" of neighbours " if where.startswith("part of") else " ") +
        (f"{thousands(calls)} × {thousands(size // calls)}"
         if size % calls == 0 else f"{thousands(calls)}: {thousands(size)}")
        for (where, operation), (calls, size) in sorted(rows.items())
        if operation not in ("irecv", AGREEMENT))


def bytes_section(build, misses):
    named = list(tower_cases()) + list(activation_cases())
    results = run_all(build, [case for _, case in named])
    lines = ["## Bytes of a step", "",
             "Operations, calls and bytes of one step on the rank that sends "
             "most, from its flight recorder (*calls × bytes of a call*). Each "
             "number of each rank equals a formula, exactly; so do `dry_run()`'s"
             " rows where it has them. What an `Agreement` gathers is counted "
             "and not shown.", "",
             "| training | ranks | counted | formula | `dry_run()` |",
             "| --- | ---: | --- | --- | --- |"]
    for (name, case), result in zip(named, results):
        ranks = result["ranks"]
        expected = EXPECTED[case["kind"]](case)
        verdict = "equal"
        for rank, (found, rows) in enumerate(zip(ranks, expected)):
            if counted_rows(found) != rows:
                verdict = "**differs**"
                misses.append(f"bytes of {name}, {world(case)} ranks, rank "
                              f"{rank}: counted {summary(counted_rows(found))},"
                              f" formula {summary(rows)}")
                break
        dry = "-"
        if "model" in case:
            computed, seen = dry_rows(case, result), seen_by_dry_run(case, ranks)
            dry = "equal" if computed == seen else "**differs**"
            if computed != seen:
                misses.append(f"dry_run() of {name}, {world(case)} ranks: "
                              f"counted {summary(seen)}, computed "
                              f"{summary(computed)}")
        most = max((counted_rows(rank) for rank in ranks),
                   key=lambda rows: sum(size for _, size in rows.values()))
        lines.append(f"| {name} | {world(case)} | {summary(most)} | {verdict} "
                     f"| {dry} |")
    return "\n".join(lines) + "\n"


# ---- Memory ----

MEMORY = {"blocks": 32, "width": 128, "bias": False}


def states(case):
    """Returns the bytes of parameters, gradients and AdamW's state of a rank,
    by the paper."""
    ranks = world(case)
    whole = parameters_of(case) * FLOAT
    stage = case["zero_stage"]
    return [whole // (ranks if stage >= 3 else 1),
            whole // (ranks if stage >= 2 else 1),
            2 * whole // (ranks if stage >= 1 else 1)]


def beside_states(case):
    """Returns the bytes that a step needs beside the states of the paper, and
    says for what. One block is `unit` bytes."""
    ranks = world(case)
    whole = parameters_of(case) * FLOAT
    unit = sum(block(case)) * FLOAT
    stage, shared = case["zero_stage"], case["shared"] and ranks > 1
    if case["kind"] == "replicated":
        if shared:
            # Gradients of 64 KiB and more are reduced where backward computes
            # them, in an arena; their places in the buckets are not used. With
            # one copy a rank has a part of the parameters only.
            more = whole - (whole - whole // ranks if stage == 1 else 0)
            what = "an arena for the gradients"
            if stage == 1:
                what += "; one copy of the parameters"
            return more, what
        if stage == 1 and ranks > 1:
            return unit + unit // ranks, "Gloo's copies of one block"
        return unit, "the gradient of one block"
    if ranks == 1:
        return 2 * unit, "the gradient of one block, twice"
    if shared:
        more = 5 * unit
        what = "one block's gradients 5 times: in two places, and an arena of 3"
        if stage == 2:
            more -= whole - whole // ranks
            what += "; one copy of the parameters"
        return more, what
    copies = 2 * unit + 2 * unit // ranks
    what = "the gradients of one block, what is reduced, and Gloo's copies of it"
    if stage == 3:
        return copies + 3 * unit, "two gathered blocks, " + what
    # The peak is where backward begins: the shards exist beside what was
    # gathered, and gradients do not.
    return copies + unit, what


def per_rank(result, what):
    """Returns for each rank its own bytes and its part of those that the ranks
    of the host share."""
    ranks = result["ranks"]
    shared = sum(rank[what][1] for rank in ranks) / len(ranks)
    return [rank[what][0] + shared for rank in ranks]


def memory_cases():
    for ranks in (1, 2, 4):
        for shared in (False, True):
            for stage in range(4):
                case = dict(
                    MEMORY, kind="replicated" if stage < 2 else "sharded",
                    zero_stage=stage, shared=shared, bucket_mb=25,
                    backend="lockstep" if shared else "gloo",
                    axes=[["shard", ranks]])
                yield of_dry_run(case, zero_stage=stage,
                                 parameters=parameters_of(case))


STAGES = ("DistributedDataParallel", "ZeRO-1", "FullyShard, ZeRO-2",
          "FullyShard, ZeRO-3")


def check_within(found, formula, what, misses):
    ratio = found / formula
    if abs(ratio - 1) <= WITHIN:
        return f"{ratio:.2f}"
    misses.append(f"{what}: {found:,.0f} bytes, formula {formula:,.0f}")
    return f"**{ratio:.2f}**"


def memory_section(build, misses):
    cases = list(memory_cases())
    results = run_all(build, cases)
    whole = parameters_of(MEMORY)
    mib = 2**20
    lines = [
        "## Memory", "",
        f"Peak of a rank in one step, in MiB: {MEMORY['blocks']} equal layers, "
        f"{thousands(whole)} parameters, AdamW, float32, small activations. "
        "Counted are bytes that LibTorch's allocator hands out; of memory that "
        "the ranks share each has an equal part. *States* are parameters, "
        "gradients and optimizer state by section 5 of the ZeRO paper, which "
        "are also `dry_run()`'s; *beside* is what is stated in the last column."
        " Counted / formula must be within 15 %, on each rank.", "",
        "| training | path | ranks | states | beside | formula | counted "
        "| ratio | beside the states |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    construction = [
        "Construction block by block needs all shards and one block:", "",
        "| training | path | ranks | formula | counted | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |"]
    for case, result in zip(cases, results):
        paper = states(case)
        name = STAGES[case["zero_stage"]]
        path = "shared" if case["shared"] else "private"
        what = f"memory of {name}, {path}, {world(case)} ranks"
        if result["dry_run"]["memory"] != paper:
            misses.append(f"{what}: dry_run() has "
                          f"{result['dry_run']['memory']}, the paper {paper}")
        more, why = beside_states(case)
        formula = sum(paper) + more
        found = max(per_rank(result, "peak"),
                    key=lambda one: abs(one / formula - 1))
        ratio = check_within(found, formula, what, misses)
        lines.append(
            f"| {name} | {path} | {world(case)} | {sum(paper) / mib:.2f} "
            f"| {more / mib:.2f} | {formula / mib:.2f} | {found / mib:.2f} "
            f"| {ratio} | {why} |")
        if case["kind"] == "sharded" and world(case) > 1:
            formula = (whole // world(case) + sum(block(case))) * FLOAT
            found = max(per_rank(result, "construction_peak"))
            ratio = check_within(found, formula, "construction: " + what,
                                 misses)
            construction.append(
                f"| {name} | {path} | {world(case)} | {formula / mib:.2f} "
                f"| {found / mib:.2f} | {ratio} |")
    return "\n".join(lines + [""] + construction) + "\n"


# ---- Bubbles ----


def bubble_formula(schedule, ranks, count, stages):
    """Returns the idle share of the ranks' time, where forward and both parts
    of backward take the same time."""
    # A rank waits for each rank before it as long as a micro-batch takes in a
    # stage, three actions; or a forward, if the second parts of backwards fill
    # the rest.
    actions = 1 if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble") else 3
    waits = (ranks - 1) * actions
    return waits / (3 * count * stages + waits)


BUBBLES = (("GPipe", 4, 8, 1), ("1F1B", 4, 8, 1), ("Interleaved1F1B", 4, 8, 2),
           ("InterleavedZeroBubble", 4, 4, 2), ("ZBVZeroBubble", 4, 8, 2))


def bubble_section(build, quick, misses):
    milliseconds, tries = (60, 1) if quick else (100, 3)
    lines = [
        "## Bubbles of pipelines", "",
        "Idle share of the ranks' time in one step. Forward, backward for "
        f"inputs and backward for parameters sleep {milliseconds} ms each, so "
        "ranks need no cores of their own; of "
        f"{tries} steps the one with the least idle time counts. *Formula* is "
        "(p - 1) / (v m + p - 1) for p ranks, m micro-batches and v stages a "
        "rank, and (p - 1) / (3 v m + p - 1) with zero-bubble schedules, which "
        "fill all but the first forwards. Counted must be within 15 % of it, "
        "and `simulate_pipeline()` equal to it.", "",
        "| schedule | p | m | v | formula | `simulate_pipeline()` | counted "
        "| ratio |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for schedule, ranks, count, stages in BUBBLES[:3] if quick else BUBBLES:
        case = {"kind": "bubble", "backend": "lockstep", "schedule": schedule,
                "axes": [["pipeline", ranks]], "micro_batches": count,
                "stages_per_rank": stages, "milliseconds": milliseconds}
        idle = []
        for result in run(build, ranks, [case] * tries):
            each = result["ranks"]
            time = (max(rank["end"] for rank in each)
                    - min(rank["begin"] for rank in each))
            idle.append(1 - sum(rank["slept"] for rank in each)
                        / (ranks * time))
        formula = bubble_formula(schedule, ranks, count, stages)
        simulated = each[0]["simulated"][1]
        if abs(simulated - formula) > 1e-12:
            misses.append(f"simulate_pipeline() of {schedule}: {simulated:.4f},"
                          f" formula {formula:.4f}")
        ratio = min(idle) / formula
        good = abs(ratio - 1) <= WITHIN
        if not good:
            misses.append(f"bubble of {schedule}: {min(idle):.4f}, formula "
                          f"{formula:.4f}")
        text = f"{ratio:.2f}" if good else f"**{ratio:.2f}**"
        lines.append(f"| {schedule} | {ranks} | {count} | {stages} "
                     f"| {formula:.4f} | {simulated:.4f} | {min(idle):.4f} "
                     f"| {text} |")
    return "\n".join(lines) + "\n"


# ---- Schedules ----


def schedule_section(build, misses):
    """Runs the test that compares schedules with PyTorch's."""
    program = build / "bin" / "tests" / "pipeline_schedule_interop_test"
    try:
        done = subprocess.run([str(program)], capture_output=True, text=True,
                              timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"{program}: {error}") from error
    numbers = re.search(r"compared (\d+) tables and (\d+) refusals", done.stdout)
    lines = ["## Schedules", ""]
    if done.returncode != 0 or not numbers:
        misses.append("schedules: " + (done.stdout + done.stderr)[-2000:])
        lines.append("**The comparison with PyTorch's schedules failed.**")
    else:
        lines.append(
            "Every schedule of PyTorch's `torch.distributed.pipelining` for at "
            "most 8 ranks, 16 micro-batches and 4 stages a rank is equal action "
            f"by action, with and without messages: {int(numbers[1]):,} tables. "
            f"What PyTorch refuses is refused: {int(numbers[2]):,} times.")
    return "\n".join(lines) + "\n"


def exact_sections(build, misses):
    return [bytes_section(build, misses), memory_section(build, misses)]


def sections(build, quick):
    """Returns sections in Markdown. Raises Failure with all that is not as it
    must be."""
    misses = []
    texts = exact_sections(build, misses)
    texts.append(bubble_section(build, quick, misses))
    texts.append(schedule_section(build, misses))
    if misses:
        raise Failure("\n".join(misses))
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path,
                        default=pathlib.Path("build"))
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    misses = []
    try:
        texts = exact_sections(options.build, misses)
        if not options.exact:
            texts.append(bubble_section(options.build, options.quick, misses))
            texts.append(schedule_section(options.build, misses))
    except Failure as failure:
        print(f"counts: {failure}", file=sys.stderr)
        return 1
    print("\n".join(texts))
    for miss in misses:
        print(f"counts: {miss}", file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
