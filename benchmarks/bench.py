"""Measures Lockstep beside PyTorch's Python, in one run: `./dev bench`.

    ./dev bench                      every benchmark
    ./dev bench mlp narrow           these
    ./dev bench comm                 operations between ranks: lockstep bench
    ./dev bench hosts                two hosts and a slow link (hosts.py); root
    ./dev bench --rounds 9 job       more rounds, less noise
    ./dev bench --quick              does it run? not a measurement

Ours and the peer alternate, round by round, so that a machine that is busy for
a while is so for both. A figure is the median of the rounds; what a step costs
in one round is itself a median over steps. The table goes to standard output,
every round's figures to JSON. What is measured, the table's columns and the
JSON's fields: docs/benchmarks.md. Needs Python's standard library, and the
torch that the peers import beside this interpreter.
"""

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import hosts

RANKS = 2
# Each with its own best: what a program gets that names none.
BACKEND = {"lockstep": "lockstep", "without_communication": "lockstep",
           "python": "gloo"}
PEERS = pathlib.Path(__file__).resolve().parent / "peers"
FORMAT = 1  # of the JSON
CHILD_TIMEOUT_S = 300
# Python's Gloo aborts now and then when its processes end (torch 2.13,
# "terminate called without an active exception"), after all work is done. Such
# a run does not count and is repeated; one of ours that fails ends the bench.
PEER_ATTEMPTS = 3
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Failure(Exception):
    """What ends the run: one line, and what the child printed."""

    def __init__(self, line, output="", is_of_child=False):
        super().__init__(line)
        self.output = output
        self.is_of_child = is_of_child


# --- Children: none outlives this process, whatever ends it.

def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children_of(pid):
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks
                for child in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
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


def run_child(command, scratch):
    """Runs `command` to its end; its standard output and its seconds."""
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",  # torchrun's default too; said, it warns no more
        TMPDIR=str(scratch))  # torchrun leaves a folder behind
    name = " ".join(map(str, command))
    out_path, err_path = scratch / "stdout", scratch / "stderr"
    with open(out_path, "wb") as out, open(err_path, "wb") as err:
        begin = time.monotonic()
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment, start_new_session=True,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM))
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


# --- What is measured.

class Programs:
    """The commands of both sides."""

    def __init__(self, build):
        self.build = build
        self.torchrun = pathlib.Path(sys.executable).parent / "torchrun"

    def lockstep(self, program, *arguments):
        launcher = self.build / "bin" / "lockstep"
        return self.existing(launcher, "./dev build", [
            launcher, "run", "--standalone", f"--nproc-per-node={RANKS}",
            self.build / "bin" / program, *arguments])

    def python(self, program, *arguments):
        return self.existing(self.torchrun, "./dev setup", [
            self.torchrun, "--standalone", f"--nproc-per-node={RANKS}",
            PEERS / program, *arguments])

    @staticmethod
    def existing(launcher, remedy, command):
        if not launcher.exists():
            raise Failure(f"{launcher} is missing; run {remedy}")
        return list(map(str, command))


class Job:
    """The tutorial's job from launch to exit."""

    unit = "s"
    sides = ("lockstep", "python")
    what = "Linear(20, 1), 2,048 samples, 50 epochs, a snapshot every 10"

    def measure(self, side, programs, scratch, quick):
        snapshot = scratch / "snapshot.pt"
        arguments = ("5" if quick else "50", "10", "--snapshot", snapshot)
        command = (programs.python("job_peer.py", *arguments)
                   if side == "python" else
                   programs.lockstep("multigpu_torchrun", *arguments))
        _, seconds = run_child(command, scratch)
        # Else the next job would resume, and have nothing to do.
        if not snapshot.exists():
            raise Failure(f"saved no snapshot: {' '.join(command)}")
        snapshot.unlink()
        return {"median": round(seconds, 4)}


class Step:
    """One training step, the slowest rank's, in microseconds."""

    unit = "us"
    sides = ("lockstep", "python", "without_communication")

    def __init__(self, model, steps, warmup, what):
        self.model, self.steps, self.warmup = model, steps, warmup
        self.what = what

    def measure(self, side, programs, scratch, quick):
        share = 5 if quick else 1
        arguments = ["--model", self.model, "--backend", BACKEND[side],
                     "--steps", max(1, self.steps // share),
                     "--warmup", max(1, self.warmup // share)]
        if side == "without_communication":
            arguments.append("--no-ddp")
        command = (programs.python("ddp_peer.py", *arguments)
                   if side == "python" else
                   programs.lockstep("benchmarks/ddp_step", *arguments))
        stdout, _ = run_child(command, scratch)
        for line in stdout.splitlines():
            try:
                figures = json.loads(line)
                return {"median": figures["median_us"], **figures}
            except (ValueError, KeyError, TypeError):
                continue  # another library's word
        raise Failure(f"printed no figures: {' '.join(command)}", stdout)


BENCHMARKS = {
    "job": Job(),
    "tutorial": Step("tutorial", 600, 100, "Linear(20, 1)"),
    "mlp": Step("mlp", 40, 10, "20-2048-2048-1, 4.2 M parameters"),
    "narrow": Step("narrow", 120, 30, "66 layers of 64"),
}


# Of `lockstep bench`, which alternates with its peers by itself and prints a
# table of its own.
COMM = "comm"
COMM_SIZES = "4,1K,16K,256K,1M,4M,16M,64M"
# Namespaces as hosts: a table and a file of its own too.
HOSTS = "hosts"
NAMES = [*BENCHMARKS, COMM, HOSTS]


def bench_comm(args):
    """all_reduce beside the peers, into a file of its own."""
    path = comm_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    programs = Programs(args.build.resolve())
    command = programs.existing(
        programs.build / "bin" / "lockstep", "./dev build", [
            programs.build / "bin" / "lockstep", "bench", "all_reduce",
            "--peers", "--python", sys.executable, "--ranks", RANKS,
            "--sizes", COMM_SIZES, "--rounds", args.rounds,
            "--seconds", 0.02 if args.quick else 0.3,
            "--json", path, "--plot", path.with_suffix(".svg")])
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        stdout, _ = run_child(command, pathlib.Path(scratch))
    print(stdout.rstrip())
    print(f"\nfigures of every round: {path}, drawn in "
          f"{path.with_suffix('.svg').name}")


def bench_hosts(args):
    """The hierarchy between two hosts beside Gloo, into a file of its own."""
    only = args.names == [HOSTS]
    path = (args.json if only and args.json is not None
            else args.build / "bench" / f"{HOSTS}.json")
    try:
        results = hosts.measure(args.build, args.rounds, args.quick, progress)
    except hosts.Unable as reason:
        progress("")
        if only:
            raise Failure(f"no hosts can be made here: {reason}") from reason
        print(f"hosts: skipped, no hosts can be made here: {reason}")
        return
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        raise Failure("a rank between the hosts failed", str(error)) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "quick": args.quick,
                                "hosts": results}, indent=1) + "\n")
    print(f"all_reduce of {hosts.BYTES >> 20} MiB between two hosts, a link "
          f"of {hosts.LINK}\n\n{hosts.table(results)}\n\n"
          f"figures of every round: {path}")


def comm_path(args):
    is_alone = args.names == [COMM] and args.json is not None
    return args.json if is_alone else args.build / "bench" / f"{COMM}.json"


def measure(names, rounds, programs, scratch, quick):
    """name -> side -> the figures of each round."""
    figures = {name: {side: [] for side in BENCHMARKS[name].sides}
               for name in names}
    for round_ in range(rounds):
        for name in names:
            for side, list_ in figures[name].items():
                progress(f"round {round_ + 1}/{rounds}: {name}, "
                         f"{side.replace('_', ' ')}")
                list_.append(measure_once(
                    BENCHMARKS[name], side, programs, scratch, quick))
    progress("")
    return figures


def measure_once(benchmark, side, programs, scratch, quick):
    attempts = PEER_ATTEMPTS if side == "python" else 1
    for failed in range(attempts):
        try:
            result = benchmark.measure(side, programs, scratch, quick)
            return {**result, "failed": failed} if failed else result
        except Failure as failure:
            if not failure.is_of_child or failed + 1 == attempts:
                raise
            progress("")
            print(f"bench: the peer {failure}; once more", file=sys.stderr)
            (scratch / "snapshot.pt").unlink(missing_ok=True)


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# --- What is said of it.

def summarise(name, sides):
    """One entry of the JSON's "benchmarks"."""
    benchmark = BENCHMARKS[name]
    result = {"name": name, "what": benchmark.what, "unit": benchmark.unit,
              "ranks": RANKS, "backend": BACKEND["lockstep"],
              "python_backend": BACKEND["python"]}
    for side, rounds in sides.items():
        result[side] = {
            "median": statistics.median(r["median"] for r in rounds),
            "rounds": rounds}

    def ratios(over, under):
        return [a["median"] / b["median"]
                for a, b in zip(sides[over], sides[under])]

    # Greater is better: how many times faster than the peer.
    by_round = ratios("python", "lockstep")
    result["ratio"] = round(
        result["python"]["median"] / result["lockstep"]["median"], 3)
    result["ratio_min"] = round(min(by_round), 3)
    result["ratio_max"] = round(max(by_round), 3)
    if "without_communication" in sides:
        # Smaller is better: how many times a step without communication.
        result["communication_ratio"] = round(
            result["lockstep"]["median"] /
            result["without_communication"]["median"], 3)
    return result


def shown(value, unit):
    if unit == "s":
        return f"{value:.2f} s"
    return f"{value:.0f} us" if value < 10_000 else f"{value / 1000:.1f} ms"


def table(results):
    header = ["benchmark", "ours", "Python", "ratio", "of the rounds",
              "without communication", "ratio"]
    rows = []
    for r in results:
        row = [r["name"], shown(r["lockstep"]["median"], r["unit"]),
               shown(r["python"]["median"], r["unit"]),
               f"{r['ratio']:.2f}x",
               f"{r['ratio_min']:.2f}-{r['ratio_max']:.2f}"]
        if "without_communication" in r:
            row += [shown(r["without_communication"]["median"], r["unit"]),
                    f"{r['communication_ratio']:.2f}"]
        else:
            row += ["-", "-"]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(header, *rows)]

    def line(cells):
        return "| " + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))) + " |"

    rule = "|" + "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def cpu_model():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def machine():
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Failure(f"{sys.executable} has no torch, which the peers need; "
                      "run ./dev setup, or pip install torch there") from None
    return {"cores": len(os.sched_getaffinity(0)), "cpu": cpu_model(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(), "torch": torch,
            "load_before": round(os.getloadavg()[0], 2)}


def header(facts, rounds, quick):
    text = (f"{facts['cores']} cores, {facts['cpu']}; torch "
            f"{facts['torch']}; {RANKS} ranks, ours on {BACKEND['lockstep']}, "
            f"Python's on {BACKEND['python']}; "
            f"{rounds} round{'s' if rounds != 1 else ''}")
    if facts["load_before"] > 0.5:
        text += (f"\nThe machine was not idle (load {facts['load_before']}): "
                 "trust the ratios, not the times.")
    if quick:
        text += "\n--quick: a trial, not a measurement."
    return text


def parse_args():
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"of {', '.join(NAMES)}; none: all")
    parser.add_argument("--rounds", type=int, default=None,
                        help="of each benchmark (default: 4)")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH",
                        help="where the figures go (default: "
                             "build/bench/NAME.json; of several: ddp.json)")
    parser.add_argument("--quick", action="store_true",
                        help="one short round, to see that it runs")
    parser.add_argument("--build", type=pathlib.Path, default="build",
                        help="the build to measure (default: build)")
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            parser.error(f"no benchmark \"{name}\"; "
                         f"there are {', '.join(NAMES)}")
    args.names = list(dict.fromkeys(args.names)) or NAMES
    if args.rounds is None:
        args.rounds = 1 if args.quick else 4
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; give 1 or more")
    if args.json is None and args.names not in ([COMM], [HOSTS]):
        name = args.names[0] if len(args.names) == 1 else "ddp"
        args.json = args.build / "bench" / f"{name}.json"
    return args


def bench(args):
    steps = [name for name in args.names if name in BENCHMARKS]
    if steps:
        bench_training(args, steps)
    if COMM in args.names:
        if steps:
            print()
        bench_comm(args)
    if HOSTS in args.names:
        if len(args.names) > 1:
            print()
        bench_hosts(args)


def bench_training(args, names):
    facts = machine()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        figures = measure(names, args.rounds,
                          Programs(args.build.resolve()),
                          pathlib.Path(scratch), args.quick)
    results = [summarise(name, sides) for name, sides in figures.items()]
    document = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc)
                        .isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": facts, "quick": args.quick, "rounds": args.rounds,
        "benchmarks": results}
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise Failure(f"cannot write {args.json}: {error.strerror}") from error
    print(header(facts, args.rounds, args.quick))
    print()
    print(table(results))
    print(f"\nfigures of every round: {args.json}")


def interrupted(number, _):
    raise SystemExit(128 + number)  # through every finally


def main():
    args = parse_args()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGHUP, interrupted)
    signal.signal(signal.SIGINT, interrupted)
    try:
        bench(args)
    except Failure as failure:
        progress("")
        if failure.output:
            print(failure.output.rstrip(), file=sys.stderr)
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
