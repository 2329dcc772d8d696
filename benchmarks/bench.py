"""Measures Lockstep beside PyTorch's Python, in one run: `./dev bench`.

    ./dev bench                      every benchmark
    ./dev bench ddp                  training steps: five models (training.py)
    ./dev bench mlp narrow           only these
    ./dev bench comm                 operations between ranks: lockstep bench
    ./dev bench hosts                two hosts and a slow link (hosts.py); root
    ./dev bench launch               two processes that do nothing (launch.py)
    ./dev bench threads              ranks beside threads (threads.py)
    ./dev bench data                 loaders alone (data.py)
    ./dev bench snapshot             saving and loading (snapshot.py)
    ./dev bench sharded              models larger than a rank (sharded.py)
    ./dev bench observe              what watching costs (observe.py)
    ./dev bench python               lockstep-torch beside Gloo (python.py)
    ./dev bench --rounds 9 job       more rounds, less noise
    ./dev bench --quick              does it run? not a measurement

Ours and the peer alternate, round by round, so that a machine that is busy for
a while is so for both. A figure is the median of the rounds; what a step costs
in one round is itself a median over steps. The tables go to standard output,
every round's figures to JSON. What is measured, the tables' columns and the
JSON's fields: docs/internals/benchmarks.md. Needs only Python's standard
library; the peers need torch beside this interpreter.
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import data
import hosts
import launch
import observe
import picture
import processes
import python
import sharded
import snapshot
import threads
import training
from processes import (Failure, Programs, RANKS, path_of_figures, progress,
                       run_child, write_figures)
from training import BACKEND, BENCHMARKS

FORMAT = 2  # of the JSON of training
HOSTS_FORMAT = 1
# Means all training steps.
DDP = "ddp"
# The benchmark `lockstep bench`, which alternates with its peers by itself and
# prints a table of its own.
COMM = "comm"
COMM_SIZES = "4,1K,16K,256K,1M,4M,16M,64M"
# Namespaces as hosts; it too has a table and a file of its own.
HOSTS = "hosts"
# The launchers alone; likewise.
LAUNCH = "launch"
# The same program in one process and in ranks; likewise.
THREADS = "threads"
# Loaders without a training; likewise.
DATA = "data"
# Saving and loading without a training; likewise.
SNAPSHOT = "snapshot"
# A model that is divided over the ranks; likewise.
SHARDED = "sharded"
# Training steps that are watched beside the same steps alone; likewise.
OBSERVE = "observe"
# Python's programs on the wheel's backend; likewise.
PYTHON = "python"
ROUNDS = 5


def comm_peers(programs):
    """The sides beside ours: those of `lockstep bench`, and programs that call
    the shared-memory protocol, its kernel and OpenMPI without LibTorch."""
    folder = programs.build / "bin" / "benchmarks"
    peers = ["registered", f"protocol={folder}/protocol_peer",
             f"kernel={folder}/protocol_peer"]
    openmpi, why = programs.openmpi()
    if openmpi:
        peers.append(openmpi)
    else:
        print(f"without openmpi: {why}")
    return peers + ["gloo", "python"]


def bench_comm(args):
    """all_reduce beside the peers, into a file of its own."""
    path = path_of_figures(args, COMM)
    path.parent.mkdir(parents=True, exist_ok=True)
    programs = Programs(args.build.resolve())
    command = programs.existing(
        programs.build / "bin" / "lockstep", "./dev build", [
            programs.build / "bin" / "lockstep", "bench", "all_reduce",
            "--peers=" + ",".join(comm_peers(programs)),
            "--python", sys.executable, "--ranks", RANKS,
            "--sizes", COMM_SIZES, "--rounds", args.rounds,
            "--seconds", 0.02 if args.quick else 0.3,
            "--json", path])
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        stdout, _ = run_child(command, pathlib.Path(scratch))
    print(stdout.rstrip())
    print(f"\nfigures of every round: {path}")


def bench_hosts(args):
    """The hierarchy between two hosts beside Gloo, into a file of its own."""
    only = args.names == [HOSTS]
    path = path_of_figures(args, HOSTS)
    try:
        results = hosts.measure(args.build, args.rounds, args.quick, progress)
    except hosts.Unable as reason:
        progress("")
        if only:
            raise Failure(f"such hosts cannot be made here: {reason}") from reason
        print(f"hosts: skipped, such hosts cannot be made here: {reason}")
        return
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        raise Failure("a rank on the hosts failed", str(error)) from error
    write_figures(path, {"format": HOSTS_FORMAT, "quick": args.quick,
                         "hosts": results})
    print(f"all_reduce of {hosts.BYTES >> 20} MiB between two hosts, a link "
          f"of {hosts.LINK}\n\n{hosts.table(results)}\n\n"
          f"figures of every round: {path}")


def bench_launch(args):
    """lockstep run beside torchrun, into a file of its own."""
    path = path_of_figures(args, LAUNCH)
    facts = machine()
    results = launch.measure(args.build, args.rounds, args.quick, progress)
    write_figures(path, {"format": launch.FORMAT, "quick": args.quick,
                         "machine": facts, **results})
    print(f"start and end of {RANKS} workers that do nothing\n\n"
          f"{launch.table(results)}\n\nfigures of every round: {path}")


def bench_in_place(args, name, module, title, field=None):
    """Measures by module.measure(), prints its table under the title and writes
    the figures, as one field or as those that they have, into a file of their
    own. `title` is a text, or makes one of the results and the machine's facts."""
    path = path_of_figures(args, name)
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        place = training.Place(Programs(args.build.resolve()),
                               pathlib.Path(scratch), None, args.quick)
        results = module.measure(args.rounds, place, progress)
    write_figures(path, {"format": module.FORMAT, "quick": args.quick,
                         "machine": facts,
                         **({field: results} if field else results)})
    text = title if isinstance(title, str) else title(results, facts)
    print(f"{text}\n\n{module.table(results)}\n\n"
          f"figures of every round: {path}")


def bench_threads(args):
    """Ranks beside one process with threads."""
    bench_in_place(args, THREADS, threads,
                   "a step at the same global batch, RANKS x THREADS", "models")


def bench_data(args):
    """Our loader beside LibTorch's and Python's."""
    bench_in_place(args, DATA, data,
                   "loops over a dataset that do nothing with the batches",
                   "workloads")


def bench_snapshot(args):
    """Our snapshots beside PyTorch's."""
    bench_in_place(args, SNAPSHOT, snapshot, lambda results, _facts:
                   f"a model of {results['bytes'] >> 20} MiB, saved to and "
                   f"loaded from {snapshot.TMPFS}")


def bench_sharded(args):
    """Ways to divide a model beside Python's."""
    bench_in_place(args, SHARDED, sharded, lambda _results, facts:
                   header(facts, args.rounds, args.quick))


def bench_observe(args):
    """Watched training steps beside the same alone."""
    bench_in_place(args, OBSERVE, observe,
                   "training steps that are watched, beside the same alone",
                   "models")


def bench_python(args):
    """Python's programs on lockstep-torch beside Gloo."""
    bench_in_place(args, PYTHON, python, lambda _results, facts:
                   header(facts, args.rounds, args.quick))


# Those with a table and a file of their own, in the order in which they run.
ALONE = {COMM: bench_comm, HOSTS: bench_hosts, LAUNCH: bench_launch,
         THREADS: bench_threads, DATA: bench_data, SNAPSHOT: bench_snapshot,
         SHARDED: bench_sharded, OBSERVE: bench_observe,
         PYTHON: bench_python}
NAMES = [*BENCHMARKS, *ALONE]


def bench_training(args, names):
    facts = machine()
    begin = time.monotonic()
    traces = args.build / "bench" / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch:
        figures = training.measure(
            names, args.rounds,
            training.Place(Programs(args.build.resolve()),
                           pathlib.Path(scratch), traces.resolve(),
                           args.quick))
    results = [training.summarise(name, sides)
               for name, sides in figures.items()]
    document = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc)
                        .isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": facts, "quick": args.quick, "rounds": args.rounds,
        "benchmarks": results}
    write_figures(args.json, document)
    print(header(facts, args.rounds, args.quick))
    print(f"\n{training.times_table(results)}")
    resources = training.resources_table(results)
    if resources:
        print(f"\nmemory in MiB\n\n{resources}")
    drawn = ""
    if any(name in picture.LABELS for name in names):
        path = args.json.with_suffix(".svg")
        path.write_text(picture.draw(results))
        drawn = f", drawn in {path.name}"
    print(f"\nfigures of every round: {args.json}{drawn}")
    if resources:
        print(f"traces of a few steps of ours: {traces}")


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
    known = ", ".join([DDP, *NAMES])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"one of {known}; {DDP}: "
                             f"{', '.join(training.STEPS)}; none: all")
    parser.add_argument("--rounds", type=int, default=None,
                        help=f"rounds of each benchmark (default: {ROUNDS})")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH",
                        help="where the figures go (default: "
                             "build/bench/NAME.json; for several: ddp.json)")
    parser.add_argument("--quick", action="store_true",
                        help="one short round, to see that it runs")
    parser.add_argument("--build", type=pathlib.Path, default="build",
                        help="the build to measure (default: build)")
    args = parser.parse_args()
    names = []
    for name in args.names:
        if name not in [DDP, *NAMES]:
            parser.error(f"no benchmark \"{name}\"; allowed are {known}")
        names += training.STEPS if name == DDP else [name]
    args.names = list(dict.fromkeys(names)) or NAMES
    if args.rounds is None:
        args.rounds = 1 if args.quick else ROUNDS
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; give 1 or more")
    if args.json is None and any(name in BENCHMARKS for name in args.names):
        name = args.names[0] if len(args.names) == 1 else DDP
        args.json = args.build / "bench" / f"{name}.json"
    return args


def bench(args):
    trained = [name for name in args.names if name in BENCHMARKS]
    if trained:
        bench_training(args, trained)
    has_printed = bool(trained)
    for name, run in ALONE.items():
        if name not in args.names:
            continue
        if has_printed:
            print()
        run(args)
        has_printed = True


def main():
    args = parse_args()
    processes.adopt_descendants()
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
