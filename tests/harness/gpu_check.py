"""Runs everything that needs a GPU and prints one table: `./dev gpu-check`.

    gpu_check.py missing TORCH      prints what this machine lacks, in one line
    gpu_check.py run BUILD PYTHON   runs the checks

TORCH is the folder of LibTorch. BUILD is the folder of the preset `cuda`, built
already. PYTHON has torch with CUDA, or the steps are timed without Python's.
The exit code is 1 if something is missing or has failed. A check that skips
says why: tests need one GPU for each rank. What a check printed is in
BUILD/gpu-check.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import summary

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import processes  # noqa: E402  (lies beside the benchmarks)

MODELS = ("narrow", "mlp", "transformer")
ROUNDS = 3
TEST_TIMEOUT_S = 900
# Makes a rank of each GPU that is visible.
EVERY_GPU = ("--standalone", "--nproc-per-node=gpu")


def missing(torch, devices):
    """Returns what is missing for the checks, in words."""
    lacks = []
    if not any(re.fullmatch(r"nvidia\d+", path.name)
               for path in devices.iterdir()):
        lacks.append(f"a GPU of NVIDIA ({devices} has no nvidia0)")
    # CMAKE_PREFIX_PATH may name LibTorch's folder or its share/cmake.
    folders = (torch, torch.resolve().parent.parent)
    if not any((folder / "lib" / "libtorch_cuda.so").exists()
               for folder in folders):
        lacks.append(f"a LibTorch with CUDA ({torch} has no "
                     "lib/libtorch_cuda.so; set LOCKSTEP_TORCH_DIR to one)")
    return lacks


def test_names(build):
    listed = subprocess.run(
        ["ctest", "--test-dir", build, "-L", "^gpu$", "--show-only=json-v1"],
        capture_output=True, text=True, check=True)
    return [test["name"] for test in json.loads(listed.stdout)["tests"]
            if "gpu" in labels_of(test)]


def labels_of(test):
    """Returns the labels; fixtures that a test needs are listed, too."""
    return [label for entry in test.get("properties", [])
            if entry["name"] == "LABELS" for label in entry["value"]]


def check_tests(build, name, log):
    """Runs one program of tests. Returns (result, figures)."""
    report = build / "test-results" / f"{name}.xml"
    report.unlink(missing_ok=True)
    with open(log, "w") as output:
        code = subprocess.run(
            ["ctest", "--test-dir", build, "-R", f"^{name}$",
             "--output-on-failure", "--no-tests=error", "--timeout",
             str(TEST_TIMEOUT_S)],
            stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if not report.exists():
        return "failed", "the program wrote no report"
    cases = [case for case in summary.cases_of(report)
             if case.get("status") == "run"]
    skipped = [case for case in cases if case.get("result") == "skipped"]
    failed = [case for case in cases if case.find("failure") is not None]
    passed = len(cases) - len(skipped) - len(failed)
    figures = f"{summary.counted(passed, 'case')} passed"
    if failed:
        figures += f", {len(failed)} failed"
    if skipped:
        reasons = sorted({summary.reason_of(case) for case in skipped})
        figures += f", {len(skipped)} skipped: {'; '.join(reasons)}"
    if code != 0:
        return "failed", figures
    return ("passed" if passed else "skipped"), figures


def check_example(build, scratch):
    """Trains, and resumes from the snapshot, on every GPU."""
    command = [build / "bin" / "lockstep", "run", *EVERY_GPU,
               build / "bin" / "multigpu_torchrun"]
    snapshot = scratch / "snapshot.pt"
    first, seconds = processes.run_child(
        [*command, "4", "2", "--snapshot", snapshot], scratch)
    again, _ = processes.run_child(
        [*command, "6", "2", "--snapshot", snapshot], scratch)
    ranks = len(set(re.findall(r"\[GPU(\d+)\]", first)))
    if ranks == 0 or "Resuming training from snapshot" not in again:
        raise processes.Failure("no rank trained on a GPU, or none resumed",
                                first + again)
    return "passed", f"{summary.counted(ranks, 'rank')}, {seconds:.1f} s"


def step_us(command, model, scratch):
    stdout, _ = processes.run_child(
        [*command, "--model", model, "--backend", "nccl", "--steps", "200",
         "--warmup", "50"], scratch)
    for line in stdout.splitlines():
        if line.startswith("{"):
            figures = json.loads(line)
            return figures["median_us"], figures["ranks"]
    raise processes.Failure("printed no figures", stdout)


def check_steps(build, python, model, scratch):
    """Times a training step on every GPU, beside Python's; alternately."""
    sides = {"lockstep": [build / "bin" / "lockstep", "run", *EVERY_GPU,
                          build / "bin" / "benchmarks" / "ddp_step"]}
    if has_cuda(python):
        sides["python"] = [python, "-m", "torch.distributed.run", *EVERY_GPU,
                           ROOT / "benchmarks" / "peers" / "ddp_peer.py"]
    times = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, command in sides.items():
            us, ranks = step_us(command, model, scratch)
            times[side].append(us)
    median = {side: statistics.median(us) for side, us in times.items()}
    figures = (f"{summary.counted(ranks, 'rank')}, "
               f"{median['lockstep']:.0f} us a step")
    if "python" not in median:
        return "passed", f"{figures}; {python} has no torch with CUDA"
    ratio = median["python"] / median["lockstep"]
    return "passed", (f"{figures}, Python {median['python']:.0f} us, "
                      f"ratio {ratio:.2f}")


def has_cuda(python):
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], capture_output=True,
                          check=False).returncode == 0


def run(build, python):
    logs = build / "gpu-check"
    logs.mkdir(exist_ok=True)
    checks = [(f"tests: {name}", name.replace("/", "_"),
               lambda log, name=name: check_tests(build, name, log))
              for name in test_names(build)]
    failed = []
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-check-") as folder:
        scratch = pathlib.Path(folder)
        checks.append(("example: multigpu_torchrun", "multigpu_torchrun",
                       lambda log: check_example(build, scratch)))
        checks += [(f"DDP step: {model}", f"ddp_step-{model}",
                    lambda log, model=model: check_steps(build, python, model,
                                                         scratch))
                   for model in MODELS]
        rows = []
        for what, name, check in checks:
            processes.progress(what)
            log = logs / f"{name}.log"
            try:
                result, figures = check(log)
            except processes.Failure as failure:
                log.write_text(failure.output)
                result, figures = "failed", str(failure)
            if result == "failed":
                failed.append(log)
            rows.append((what, result, figures))
    processes.progress("")
    width = max(len(what) for what, _, _ in rows)
    for what, result, figures in [("what", "result", "figures"), *rows]:
        print(f"{what:<{width}}  {result:<7}  {figures}")
    for log in failed:
        print(f"what failed: {log}")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    looks = commands.add_parser("missing")
    looks.add_argument("torch", type=pathlib.Path)
    looks.add_argument("--devices", type=pathlib.Path,
                       default=pathlib.Path("/dev"))
    runs = commands.add_parser("run")
    runs.add_argument("build", type=pathlib.Path)
    runs.add_argument("python")
    args = parser.parse_args()
    if args.command == "missing":
        lacks = missing(args.torch, args.devices)
        if lacks:
            print(f"gpu-check needs {' and '.join(lacks)}")
        sys.exit(1 if lacks else 0)
    processes.adopt_descendants()
    sys.exit(run(args.build.resolve(), args.python))


if __name__ == "__main__":
    main()
