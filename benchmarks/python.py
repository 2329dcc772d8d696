"""lockstep-torch in Python: what a step costs on Lockstep beside Gloo and beside
no communication, all_reduce that Python calls, and `import torch`."""

import dataclasses
import json
import pathlib
import statistics
import sys

from processes import Failure, PEERS, RANKS, run_child
from ratios import Ratio, goal, met, ratio_of, row, rule, shown

FORMAT = 1
SOURCE = pathlib.Path(__file__).resolve().parents[1]
SIZES = "4,1K,16K,256K,1M,4M,16M,64M"
QUICK_SIZES = "4,16K,4M"
# all_reduce that Python calls may take this much longer than the C++ function.
# Of larger tensors the times of two programs differ by more from run to run.
OVERHEAD_US, OVERHEAD_UP_TO = 4, 16 << 10
# The time that `import torch` may take longer.
IMPORT_MS = 5
# Reads what torch looks for at the end of its import, alone.
IMPORT = """
import os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
begin = time.perf_counter()
torch._import_device_backends()
print((time.perf_counter() - begin) * 1e3)
"""
# Calls all_reduce with torch's backend that does nothing, as `lockstep
# bench` does: some time after the call before.
FAKE_CALL = """
import time, torch, torch.distributed as dist
dist.init_process_group("fake", rank=0, world_size=2)
tensor = torch.ones(1)
times = []
for _ in range(2_000):
    start = time.perf_counter() + 1e-4
    while time.perf_counter() < start:
        pass
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    times.append(time.perf_counter() - begin)
times.sort()
print(times[len(times) // 2] * 1e6)
"""


@dataclasses.dataclass
class Case:
    """A step of python_peer.py, and what is compared."""

    what: str
    ratios: tuple


SIDES = {"lockstep": "lockstep", "gloo": "Gloo", "no_hook": "a no-op hook",
         "from_group": "memory of the group", "deepspeed": "DeepSpeed"}


def ddp_case(what, faster):
    return Case(f"DDP, {what}", (Ratio("lockstep", "no_hook", at_most=1.1),
                                 Ratio("gloo", "lockstep", at_least=faster)))


def decode_case(what):
    return Case(f"decoding, {what}",
                (Ratio("gloo", "lockstep", at_least=1.5),
                 Ratio("deepspeed", "lockstep", at_least=1)))


CASES = {
    "ddp_tutorial": ddp_case("tutorial", 5),
    "ddp_mlp": ddp_case("mlp", 1.5),
    "ddp_transformer": ddp_case("transformer", 1.3),
    "decode_float32_1": decode_case("float32, batch 1"),
    "decode_float32_8": decode_case("float32, batch 8"),
    "decode_bfloat16_1": decode_case("bfloat16, batch 1"),
    "decode_bfloat16_8": decode_case("bfloat16, batch 8"),
    "fsdp": Case("FSDP2, transformer",
                 (Ratio("gloo", "lockstep", at_least=1.2),
                  Ratio("gloo", "from_group", at_least=1.2))),
}


# --- Measuring.

def install(place):
    """Returns the Python of an environment in which the wheel is installed, made
    from the build."""
    build = place.programs.build
    if not list((build / "python").glob("_C*.so")):
        raise Failure(f"{build}/python has no backends for Python; "
                      f"{build}/configure.log says why")
    folder = build / "bench" / "python" / "environment"
    run_child([sys.executable, SOURCE / "tests" / "python" / "install_wheel.py",
               build, SOURCE, folder], place.scratch)
    return folder / "bin" / "python"


def compile_deepspeed(python, place):
    """Returns DeepSpeed's library and an empty text, or None and why there is
    none."""
    folder = place.programs.build / "bench" / "python" / "deepspeed"
    try:
        output, _ = run_child([python, PEERS / "deepspeed_op.py", folder],
                              place.scratch)
        return output.splitlines()[-1], ""
    except Failure as failure:
        lines = failure.output.splitlines() or [str(failure)]
        return None, f"its operation was not compiled: {lines[-1]}"


def run_steps(python, deepspeed, rounds, place):
    """Returns name of a case -> side -> figures of each round."""
    programs = place.programs
    launcher = programs.build / "bin" / "lockstep"
    command = programs.existing(launcher, "./dev build", [
        launcher, "run", "--standalone", f"--nproc-per-node={RANKS}",
        python, PEERS / "python_peer.py", "--rounds", rounds,
        *(["--quick"] if place.quick else []),
        *(["--deepspeed", deepspeed] if deepspeed else [])])
    stdout, _ = run_child(command, place.scratch)
    for line in stdout.splitlines():
        try:
            return {case["name"]: case["sides"]
                    for case in json.loads(line)["cases"]}
        except (ValueError, KeyError, TypeError):
            continue  # a library's line
    raise Failure(f"printed no figures: {' '.join(command)}", stdout)


def run_all_reduce(python, rounds, place):
    """Returns bytes -> side -> microseconds of each round."""
    programs = place.programs
    launcher = programs.build / "bin" / "lockstep"
    path = place.scratch / "all_reduce.json"
    openmpi, _ = programs.openmpi()
    peers = ["python-lockstep", "python", *([openmpi] if openmpi else [])]
    command = programs.existing(launcher, "./dev build", [
        launcher, "bench", "all_reduce", f"--peers={','.join(peers)}",
        "--python", python, "--ranks", RANKS,
        "--sizes", QUICK_SIZES if place.quick else SIZES, "--rounds", rounds,
        "--seconds", 0.02 if place.quick else 0.2, "--json", path])
    run_child(command, place.scratch)
    times = {}
    for one in json.loads(path.read_text())["results"]:
        times.setdefault(one["bytes"], {})[one["side"]] = [
            each["p50"] for each in one["rounds"]]
    return times


def run_fake_call(python, rounds, place):
    """Returns how many microseconds a call with a backend that does nothing
    takes, in each round: what all_reduce takes in torch itself."""
    return [float(run_child([python, "-c", FAKE_CALL], place.scratch)[0])
            for _ in range(rounds)]


def run_import(python, rounds, place):
    """Returns how many milliseconds each Python takes, in each round, for what
    it finds beside torch."""
    times = {"with": [], "without": []}
    for _ in range(rounds):
        for name, one in (("with", python), ("without", sys.executable)):
            output, _ = run_child([one, "-c", IMPORT], place.scratch)
            times[name].append(float(output))
    return times


def measure(rounds, place, progress):
    """Returns summarise() of the figures of every round."""
    progress("python: installing the wheel")
    python = install(place)
    progress("python: compiling DeepSpeed's all_reduce")
    deepspeed, without_deepspeed = compile_deepspeed(python, place)
    progress("python: steps")
    steps = run_steps(python, deepspeed, rounds, place)
    progress("python: all_reduce")
    all_reduce = run_all_reduce(python, rounds, place)
    fake_calls = run_fake_call(python, rounds, place)
    progress("python: import torch")
    imports = run_import(python, rounds, place)
    progress("")
    return summarise(steps, all_reduce, fake_calls, imports,
                     {"DeepSpeed": without_deepspeed,
                      "OpenMPI": place.programs.openmpi()[1]})


# --- What is said of the figures.

def summarise(steps, all_reduce, fake_calls, imports, left_out):
    """Returns the JSON's fields."""
    added = statistics.median(imports["with"]) - statistics.median(
        imports["without"])
    missing = [CASES[name].what for name, sides in steps.items()
               if name.startswith("decode") and "deepspeed" not in sides]
    if missing and not left_out.get("DeepSpeed"):
        left_out = {**left_out, "DeepSpeed":
                    f"{'; '.join(missing)}: its operation needs AVX2 for float32 "
                    "and AVX-512 (BW) for bfloat16, without which DeepSpeed calls "
                    "Gloo"}
    return {
        "steps": [case_of(name, sides) for name, sides in steps.items()],
        "all_reduce": [size_of(size, sides)
                       for size, sides in all_reduce.items()],
        "fake_call": {"median_us": statistics.median(fake_calls),
                      "rounds": fake_calls},
        "import": {"added_ms": round(added, 3), "rounds": imports,
                   "target": {"at_most": IMPORT_MS},
                   "target_met": added <= IMPORT_MS},
        "left_out": {name: why for name, why in left_out.items() if why}}


def case_of(name, sides):
    case = CASES[name]
    return {"name": name, "what": case.what,
            "sides": {side: {"median_ms": statistics.median(
                one["median_ms"] for one in rounds), "rounds": rounds}
                for side, rounds in sides.items()},
            "ratios": [ratio_of(ratio, sides) for ratio in case.ratios
                       if ratio.over in sides and ratio.under in sides]}


def size_of(size, sides):
    figures = {side: [{"median_ms": us / 1e3} for us in rounds]
               for side, rounds in sides.items()}
    ratios = [Ratio("python", "python-lockstep",
                    at_least=20 if size <= 16 << 10 else
                    4 if size >= 4 << 20 else None)]
    if "openmpi" in sides:
        ratios.append(Ratio("openmpi", "lockstep", at_least=1.2
                            if 4 << 20 <= size <= 16 << 20 else None))
    overhead = statistics.median(
        python - cpp for python, cpp in zip(sides["python-lockstep"],
                                            sides["lockstep"]))
    result = {"bytes": size, "overhead_us": round(overhead, 2),
              "sides": {side: {"median_us": statistics.median(rounds),
                               "rounds": rounds}
                        for side, rounds in sides.items()},
              "ratios": [ratio_of(ratio, figures) for ratio in ratios]}
    if size <= OVERHEAD_UP_TO:
        result |= {"overhead_target": {"at_most": OVERHEAD_US},
                   "overhead_target_met": overhead <= OVERHEAD_US}
    return result


def table(results):
    """Returns the tables of the steps and of all_reduce, the line of the import,
    and what was left out."""
    lines = [row(["a step", "on lockstep", "beside it", "takes", "ratio of",
                  "ratio", "target"]), rule(6)]
    for case in results["steps"]:
        for ratio in case["ratios"]:
            ours, other = ((ratio["over"], ratio["under"])
                           if ratio["over"] == "lockstep" else
                           (ratio["under"], ratio["over"]))
            times = [duration(case["sides"][side]["median_ms"] * 1e3)
                     for side in (ours, other)]
            what = case["what"] + (f", {SIDES[ours]}" if ours != "lockstep"
                                   else "")
            lines.append(row([what, times[0], SIDES[other], times[1],
                              f"{SIDES[ratio['over']]} / "
                              f"{SIDES[ratio['under']]}",
                              shown(ratio), goal(ratio["target"])]))
    has_openmpi = any(len(size["ratios"]) > 1 for size in results["all_reduce"])
    lines += ["", row(["all_reduce", "C++", "Python", "more", "target",
                       "Python on Gloo", "Gloo / ours", "target",
                       *(["OpenMPI", "OpenMPI / C++", "target"]
                         if has_openmpi else [])]),
              rule(10 if has_openmpi else 7)]
    for size in results["all_reduce"]:
        times = {side: duration(one["median_us"])
                 for side, one in size["sides"].items()}
        cells = [size_text(size["bytes"]), times["lockstep"],
                 times["python-lockstep"],
                 f"{size['overhead_us']:.1f} us" + (
                     met(size["overhead_target_met"])
                     if "overhead_target" in size else ""),
                 goal(size.get("overhead_target")) + (
                     " us" if "overhead_target" in size else "")]
        for side, ratio in zip(("python", "openmpi"), size["ratios"]):
            cells += [times[side], shown(ratio), goal(ratio.get("target"))]
        lines.append(row(cells))
    lines += ["", "a call of all_reduce in torch itself, with a backend that does "
                  f"nothing: {results['fake_call']['median_us']:.1f} us"]
    imported = results["import"]
    lines += [f"`import torch` with the wheel installed: "
                  f"{imported['added_ms']:.1f} ms more; target "
                  f"{goal(imported['target'])} ms"
                  f"{met(imported['target_met'])}"]
    lines += [f"without {name}: {why}"
              for name, why in results["left_out"].items()]
    return "\n".join(lines)


def duration(us):
    if us >= 10_000:
        return f"{us / 1000:.1f} ms"
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def size_text(size):
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"
