"""Measures a training that heals (docs/healing.md), the model "mlp" of 4 M
parameters on two ranks: how long it is from the death of a rank to the next step
that all have completed; the same when the job is restarted instead and repeats
the steps since its snapshot, and in torchft; and what healing costs a step as
long as nobody dies."""

import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import recovery
from processes import Failure, PEERS, RANKS
from recovery import await_true

ALLOWED_S = 120
# The rank is killed when it has completed so many steps more than the snapshot.
SNAPSHOT_AT, REPEATED, AFTERWARDS = 20, 100, 10
QUICK_REPEATED = 10
BLOCK, BLOCKS = 25, 12  # steps of a block, and blocks of each way
# The targets: milliseconds beside the time of a step; times as fast as the
# others; and what a step costs more, in percent.
TARGET_MS = 60
TARGET_RATIO = 10
TARGET_COST = 1
SIDES = {"healing": "healing, a standby process",
         "restart": "restart with standby processes, repeated steps",
         "torchft": "torchft: the survivor's next commit"}
# Trainings in which nobody dies, and the options of healing.cpp.
COSTS = {"a step with HealedTraining": (),
         "a divided step with HealedTraining": ("--shard",)}
PACKAGES = [["--no-deps", "torchft==0.2.0"],
            # It imports these beside torch.
            ["opentelemetry-sdk==1.45.2",
             "opentelemetry-exporter-otlp-proto-http==1.45.2"]]


def torchft_packages(build, note):
    """Returns the folder with torchft, which is installed there if it is missing;
    None if it cannot be."""
    folder = (pathlib.Path(build) / "bench" / "torchft").resolve()
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for packages in PACKAGES:
        command = [sys.executable, "-m", "pip", "install", "--quiet",
                   "--target", part, *packages]
        result = subprocess.run(command, stdin=subprocess.DEVNULL,
                                capture_output=True, check=False, text=True)
        if result.returncode != 0:
            note(f"launch: torchft is left out, {' '.join(map(str, command))} "
                 f"failed: {result.stderr.strip()}")
            return None
    part.rename(folder)
    return folder


class Job:
    """Processes that write their steps into a folder, and are killed at the
    end."""

    def __init__(self, what, folder):
        self.what = what
        self.folder = folder
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, command, **environment):
        with open(self.folder / "output", "ab") as output:
            self.processes.append(subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1",
                                    **environment}))

    def failed(self, how):
        return Failure(f"{self.what} {how}", self.output(), is_of_child=True)

    def output(self):
        return (self.folder / "output").read_text(errors="replace")

    def await_true(self, what, condition):
        def checked():
            value = condition()
            if not value and any(process.poll() not in (None, -signal.SIGKILL)
                                 for process in self.processes):
                raise self.failed(f"ended before {what}")
            return value
        return await_true(f"{what} ({self.what})", checked, ALLOWED_S)

    def await_end(self):
        try:
            code = self.processes[0].wait(ALLOWED_S)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end in {ALLOWED_S} s") from None
        if code != 0:
            raise self.failed(f"failed with exit code {code}")


def steps_of(folder, rank):
    """Returns the steps that each process of a rank has completed: by process
    id, the words of each line by its first, the step."""
    found = {}
    for path in folder.glob(f"{rank}-*"):
        lines = path.read_text().split("\n")[:-1]  # the last may not be whole
        found[int(path.name.partition("-")[2])] = {
            int(line.split()[0]): list(map(int, line.split()[1:]))
            for line in lines}
    return found


def await_step(job, rank, step, *words):
    """Returns the process of the rank when it has completed the step; `words`
    are the end of that line."""
    def completed():
        for pid, steps in steps_of(job.folder, rank).items():
            last = max(steps, default=-1)
            if last >= step and steps[last][1:] == list(words):
                return pid
        return None
    return job.await_true(f"step {step} of rank {rank}", completed)


def step_ms(steps, until):
    """Returns the median time of the steps that ended until then."""
    ends = sorted(words[0] for words in steps.values() if words[0] <= until)
    return statistics.median(b - a for a, b in zip(ends, ends[1:])) / 1e6


def our_command(launchers, program, folder, *options):
    return [launchers["lockstep"], "run", f"--rdzv-id={recovery.JOB}",
            f"--nproc-per-node={RANKS}", "--max-restarts=1", *options, program,
            "--folder", folder]


def begin_when_ready(job, launcher, standby):
    """Lets the training begin when the standby processes wait, so that it does
    not compete with their start."""
    job.await_true("the wait of the standby processes",
                   lambda: recovery.standby_processes(launcher) == standby)
    (job.folder / "go").touch()


def kill_and_end(launchers, program, side, quick):
    """Returns the milliseconds from SIGKILL of rank 1 to the end of the first
    step after it, on the rank that ends it last, and those of an undisturbed
    step: for a restart the step in which the rank was killed, for healing the
    first step of the process that took the place."""
    heals = side == "healing"
    standby = 1 if heals else RANKS
    killed_after = SNAPSHOT_AT + (QUICK_REPEATED if quick else REPEATED)
    with (tempfile.TemporaryDirectory() as name,
          Job(SIDES[side], pathlib.Path(name)) as job):
        job.start([*our_command(launchers, program, name,
                                f"--standby={standby}",
                                *(["--heal"] if heals else [])),
                   "--steps", killed_after + AFTERWARDS,
                   "--snapshot", SNAPSHOT_AT])
        begin_when_ready(job, launchers["lockstep"], standby)
        killed = await_step(job, 1, killed_after)
        survivor = await_step(job, 0, 1)
        begin = time.monotonic_ns()
        os.kill(killed, signal.SIGKILL)
        job.await_end()
        return figures_of_kill(job.folder, begin, killed, survivor, heals)


def figures_of_kill(folder, begin, killed, survivor, heals):
    """Returns the figures of kill_and_end() from the files of the steps."""
    first, second = (steps_of(folder, rank) for rank in range(RANKS))
    before = second.pop(killed)
    undisturbed = first[survivor] if heals else first.pop(survivor)
    if len(first) != 1 or len(second) != 1:
        raise Failure(f"after SIGKILL of rank 1 rank 0 had {len(first)} and "
                      f"rank 1 {len(second)} processes, and not one")
    after = [*first.values(), *second.values()]
    step = min(after[1], default=0) if heals else max(before) + 1
    if any(step not in one for one in after):
        raise Failure(f"step {step} was not completed after SIGKILL of rank 1")
    return {"ms": (max(one[step][0] for one in after) - begin) / 1e6,
            "step_ms": step_ms(undisturbed, begin)}


def torchft_ms(packages):
    """Returns the same of torchft, until the next commit of the replica group
    that is left."""
    with (tempfile.TemporaryDirectory() as name,
          Job(SIDES["torchft"], pathlib.Path(name)) as job):
        peer = [sys.executable, PEERS / "torchft_peer.py"]
        path = {"PYTHONPATH": str(packages)}
        job.start([*peer, "lighthouse", name], **path)
        job.await_true("the start of the lighthouse",
                       (job.folder / "lighthouse").exists)
        for replica in range(2):
            job.start([*peer, replica, name], **path)
        killed = await_step(job, 1, SNAPSHOT_AT, 2)
        survivor = await_step(job, 0, SNAPSHOT_AT, 2)
        begin = time.monotonic_ns()
        os.kill(killed, signal.SIGKILL)
        await_step(job, 0, SNAPSHOT_AT, 1)  # alone
        steps = steps_of(job.folder, 0)[survivor]
        alone = min(end for end, replicas in steps.values()
                    if end > begin and replicas == 1)
        return {"ms": (alone - begin) / 1e6, "step_ms": step_ms(steps, begin)}


def cost(launchers, program, quick, *options):
    """Returns the median steps of blocks with and without HealedTraining, in a
    job in which nobody dies."""
    with (tempfile.TemporaryDirectory() as name,
          Job("the cost of healing", pathlib.Path(name)) as job):
        job.start([*our_command(launchers, program, name, "--standby=1",
                                "--heal"),
                   "--steps", BLOCK, "--blocks", 1 if quick else BLOCKS,
                   *options])
        begin_when_ready(job, launchers["lockstep"], 1)
        job.await_end()
        for line in job.output().splitlines():
            try:
                figures = json.loads(line)
                return {way: figures[way] for way in ("plain_us", "healed_us")}
            except (ValueError, KeyError, TypeError):
                continue  # the launcher's line
        raise job.failed("printed no figures")


def measure_round(launchers, program, torchft, quick):
    """Returns the figures of each side in one round. `torchft`: its folder, or
    None to leave it out."""
    figures = {side: kill_and_end(launchers, program, side, quick)
               for side in ("healing", "restart")}
    if torchft is not None:
        figures["torchft"] = torchft_ms(torchft)
    for what, options in COSTS.items():
        figures[what] = cost(launchers, program, quick, *options)
    return figures


def summarise(rounds):
    """Returns medians over the rounds; ratios are taken within a round."""
    sides = {}
    for side in SIDES:
        if side not in rounds[0]:
            continue
        sides[side] = {
            "ms": statistics.median(one[side]["ms"] for one in rounds),
            "step_ms": statistics.median(one[side]["step_ms"]
                                         for one in rounds),
            "round_ms": [one[side]["ms"] for one in rounds]}
        if side != "healing":
            sides[side]["ratio"] = statistics.median(
                one[side]["ms"] / one["healing"]["ms"] for one in rounds)
    costs = {}
    for what in COSTS:
        # Divides by the block beside it: what slows a machine for a while slows
        # both.
        blocks = [healed / plain for one in rounds for plain, healed in
                  zip(one[what]["plain_us"], one[what]["healed_us"])]
        costs[what] = {"ratio": statistics.median(blocks),
                       "quartiles": (statistics.quantiles(blocks, n=4)[::2]
                                     if len(blocks) > 1 else blocks * 2)}
    return {"sides": sides, "rounds": rounds, "costs": costs,
            # Without the time of the step itself.
            "healing_ms": statistics.median(
                one["healing"]["ms"] - one["healing"]["step_ms"]
                for one in rounds)}


def targets(results):
    """As launch.targets()."""
    value = results["healing_ms"]
    rows = [("healing, without the step itself: ms", TARGET_MS, value,
             value <= TARGET_MS)]
    for side, one in results["sides"].items():
        if "ratio" in one:
            rows.append((f"healing: times as fast as {side}", TARGET_RATIO,
                         one["ratio"], one["ratio"] >= TARGET_RATIO))
    for what, one in results["costs"].items():
        percent = 100 * (one["ratio"] - 1)
        rows.append((f"{what}: % longer", TARGET_COST, percent,
                     percent <= TARGET_COST))
    return rows


def table(results):
    """Returns the lines of a table."""
    rows = ["| from SIGKILL of a rank to the next step of all | median | rounds "
            "| healing is faster | a step |",
            "| --- | ---: | ---: | ---: | ---: |"]
    for side, one in results["sides"].items():
        ratio = f"{one['ratio']:.1f}×" if "ratio" in one else ""
        rows.append(f"| {SIDES[side]} | {one['ms']:.1f} ms | "
                    f"{min(one['round_ms']):.1f}–{max(one['round_ms']):.1f} ms | "
                    f"{ratio} | {one['step_ms']:.1f} ms |")
    rows.append("")
    for what, one in results["costs"].items():
        low, high = one["quartiles"]
        rows.append(f"{what} / without, nobody dies: {one['ratio']:.3f} "
                    f"(quartiles {low:.3f}–{high:.3f})")
    return rows
