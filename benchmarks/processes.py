"""Runs the programs of the benchmarks: none outlives this process, whatever
ends it, and each gets the same surroundings."""

import ctypes
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

RANKS = 2
PEERS = pathlib.Path(__file__).resolve().parent / "peers"
CHILD_TIMEOUT_S = 300
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Failure(Exception):
    """What ends the run: one line, and what the child printed."""

    def __init__(self, line, output="", is_of_child=False):
        super().__init__(line)
        self.output = output
        self.is_of_child = is_of_child


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def interrupted(number, _):
    raise SystemExit(128 + number)  # runs every `finally`


def adopt_descendants():
    """Makes this process adopt all its descendants, and lets signals end it in
    order."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, interrupted)


def children_of(pid):
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks
                for child in (task / "children").read_text().split()]
    except OSError:  # the process has ended meanwhile
        return []


def end_children():
    """Kills whatever still descends from this process. (The workers of
    torchrun have sessions of their own; as this process is their subreaper
    they fall to it when torchrun ends.)"""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        descendants, queue = [], children_of(os.getpid())
        while queue:
            pid = queue.pop()
            descendants.append(pid)
            queue += children_of(pid)
        if not descendants:
            return
        for pid in descendants:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.01)


def run_child(command, scratch, threads=1, limit=None):
    """Runs `command` to its end, with `threads` for each process's operators,
    and with `limit`, a resource and its most, for each process. Returns its
    standard output and seconds."""
    def prepare():
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    environment = dict(
        os.environ,
        # 1 is torchrun's default; given, it does not warn.
        OMP_NUM_THREADS=str(threads),
        TMPDIR=str(scratch))  # torchrun leaves a folder there
    name = " ".join(map(str, command))
    out_path, err_path = scratch / "stdout", scratch / "stderr"
    with open(out_path, "wb") as out, open(err_path, "wb") as err:
        begin = time.monotonic()
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment, start_new_session=True, preexec_fn=prepare)
        except OSError as error:
            raise Failure(f"cannot start {name}: {error.strerror}") from error
        try:
            code = child.wait(CHILD_TIMEOUT_S)
            seconds = time.monotonic() - begin
            ended = f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            code, ended = None, f"did not end in {CHILD_TIMEOUT_S} s"
        finally:
            end_children()
    stdout = out_path.read_text(errors="replace")
    if code != 0:
        raise Failure(f"{ended}: {name}",
                      stdout + err_path.read_text(errors="replace"),
                      is_of_child=True)
    return stdout, seconds


class Programs:
    """The commands of both sides."""

    def __init__(self, build):
        self.build = build
        self.torchrun = pathlib.Path(sys.executable).parent / "torchrun"

    def lockstep(self, program, *arguments, ranks=RANKS):
        launcher = self.build / "bin" / "lockstep"
        return self.existing(launcher, "./dev build", [
            launcher, "run", "--standalone", f"--nproc-per-node={ranks}",
            self.build / "bin" / program, *arguments])

    def python(self, program, *arguments):
        return self.existing(self.torchrun, "./dev setup", [
            self.torchrun, "--standalone", f"--nproc-per-node={RANKS}",
            PEERS / program, *arguments])

    def openmpi(self):
        """Returns OpenMPI as a peer of `lockstep bench` and an empty text, or
        None and why there is none."""
        program = self.build / "bin" / "benchmarks" / "openmpi_peer"
        if not program.exists():
            return None, ("it was not built, because mpi.h was not found "
                          "(Debian: libopenmpi-dev)")
        if not shutil.which("mpirun"):
            return None, "mpirun was not found"
        return f"openmpi={program}", ""

    @staticmethod
    def existing(launcher, remedy, command):
        if not launcher.exists():
            raise Failure(f"{launcher} is missing; run {remedy}")
        return list(map(str, command))


def path_of_figures(args, name):
    """Returns the file for the figures of a benchmark that has one of its own:
    --json names it if nothing else is run."""
    if args.names == [name] and args.json is not None:
        return args.json
    return args.build / "bench" / f"{name}.json"


def write_figures(path, document):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from error


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
