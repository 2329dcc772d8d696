"""Measures what happens when processes of a job are killed: how long it is from
the death of a rank to the next all-reduce of its group, under our launcher, with
and without standby processes, and under torchrun; and for how long processes are
left when our launcher is killed."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from processes import Failure, RANKS, children_of

ALLOWED_S = 60
JOB = "bench-recovery"
# The targets: times faster than torchrun.
TARGETS = {"restart": 4, "standby": 15}
LEFT_TARGET_S = 1


def await_true(what, condition, allowed=ALLOWED_S):
    """Returns condition() as soon as it is true."""
    deadline = time.monotonic() + allowed
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Failure(f"recovery: {what} did not happen within {allowed} s")
        time.sleep(0.001)
    return value


def read_numbers(path):
    return [int(word) for word in path.read_text().split()]


def standby_processes(launcher):
    """Returns how many standby processes of JOB wait."""
    result = subprocess.run([launcher, "status", "--json", JOB],
                            capture_output=True, check=False, text=True)
    return json.loads(result.stdout)["standby"] if result.stdout else 0


def side_commands(launchers, worker):
    """Returns the command of each side, without its last argument."""
    options = [f"--nproc-per-node={RANKS}", "--max-restarts=1"]
    ours = [launchers["lockstep"], "run", f"--rdzv-id={JOB}", *options]
    return {"torchrun": [launchers["torchrun"], "--standalone", *options,
                         "--no-python", worker],
            "restart": [*ours, worker],
            "standby": [*ours, f"--standby={RANKS}", worker]}


def recovery_ms(side, command, launcher):
    """Returns the time from SIGKILL of rank 1 to the end of the first
    all-reduce of the next attempt, on the rank that ends it last."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        job = subprocess.Popen([*command, name], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
        try:
            first = [folder / f"0-{rank}" for rank in range(RANKS)]
            await_true("the first all-reduce",
                       lambda: all(file.exists() for file in first))
            if side == "standby":
                await_true("the wait of the standby processes",
                           lambda: standby_processes(launcher) == RANKS)
            time.sleep(1)  # nothing else runs then
            pid = read_numbers(first[1])[0]
            begin = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
            _, words = job.communicate(timeout=ALLOWED_S)
        finally:
            job.kill()
        if job.returncode != 0:
            raise Failure(f"recovery under {side} failed with exit code "
                          f"{job.returncode}", words.decode(errors="replace"),
                          is_of_child=True)
        ends = [read_numbers(folder / f"1-{rank}")[1] for rank in range(RANKS)]
        return (max(ends) - begin) / 1e6


def descendants(pid):
    found = [pid]
    for one in found:
        found += children_of(one)
    return found


def is_there(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def left_ms(launcher):
    """Returns how long after SIGKILL of the launcher its last process was
    gone. Each worker has started another program."""
    command = [launcher, "run", f"--nproc-per-node={RANKS}", "sh", "-c",
               "sleep 1000 & wait"]
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    # The launcher, its agent, and two of each worker.
    everything = await_true(
        "the start of the workers",
        lambda: (lambda pids: pids if len(pids) == 2 + 2 * RANKS else None)(
            descendants(job.pid)))
    begin = time.monotonic()
    job.kill()
    await_true("the end of all processes after the launcher's",
               lambda: not any(map(is_there, everything)))
    ended = time.monotonic()
    job.wait()
    return (ended - begin) * 1000


def measure_round(launchers, worker, quick):
    """Returns the ms of each side, and of the processes that are left, in one
    round."""
    commands = side_commands(launchers, worker)
    if quick:
        commands.pop("torchrun")
    return {**{side: recovery_ms(side, command, launchers["lockstep"])
               for side, command in commands.items()},
            "left": left_ms(launchers["lockstep"])}
