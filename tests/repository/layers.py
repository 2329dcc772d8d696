"""Checks what the design says of files and includes (docs/architecture.md).

    layers.py SOURCE

- A layer includes the layers above it in the table and nothing below; layers
  in one row do not include each other.
- base, kernels, launch, the command and the protocol of shared memory include
  nothing of LibTorch; of launch one folder does, c10d, which is a module that
  is loaded when it is needed, and of the command the programs that a subcommand
  starts (TORCH_PROGRAMS).
"""

import pathlib
import re
import sys

# A layer may include layers of earlier rows and itself.
ROWS = [
    ["base"],
    ["kernels", "launch"],
    ["comm"],
    ["data", "optim", "amp", "checkpoint", "observe"],
    ["parallel"],
]
ALLOWED = {}
for index, row in enumerate(ROWS):
    above = [layer for earlier in ROWS[:index] for layer in earlier]
    for layer in row:
        ALLOWED[layer] = {layer, *above} - ({"launch"} - {layer})
ALLOWED["kernels"] = {"base", "kernels"}
ALLOWED["cli"] = {"base", "launch", "cli"}
WITHOUT_TORCH = {"base", "kernels", "launch", "cli"}
TORCH_MODULES = {("launch", "c10d")}
# Programs that a subcommand starts because it needs LibTorch: they may include
# all.
TORCH_PROGRAMS = {("cli", "bench", "rank")}
# The part of comm that does not use LibTorch; `lockstep bench` measures it
# alone.
PLAIN = re.compile(r"lockstep/(kernels/|comm/shm/protocol/)")
ALLOWED["torch program"] = {"cli"}.union(*ROWS)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def check_includes(source):
    for path in sorted((source / "lockstep").rglob("*")):
        parts = path.relative_to(source / "lockstep").parts
        if path.suffix not in {".h", ".cpp", ".cu"} or len(parts) < 2:
            continue
        layer = parts[0]
        if layer not in ALLOWED:
            yield f"{path}: the layer {layer} is not in the table"
            continue
        if parts[:3] in TORCH_PROGRAMS:
            layer = "torch program"
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            name = match[1]
            if name.startswith("lockstep/"):
                other = name.split("/")[1]
                if parts[:2] == ("cli", "bench") and PLAIN.match(name):
                    continue
                if other not in ALLOWED[layer]:
                    yield f"{path}:{number}: {layer} must not include {other}"
            elif ((layer in WITHOUT_TORCH and parts[:2] not in TORCH_MODULES
                   or PLAIN.match(f"lockstep/{'/'.join(parts)}"))
                  and re.match(r"(torch|ATen|c10|caffe2)/", name)):
                yield f"{path}:{number}: {layer} must not include LibTorch"
            elif name == "Python.h":
                yield f"{path}:{number}: Lockstep must not need Python"


def main():
    source = pathlib.Path(sys.argv[1])
    faults = list(check_includes(source))
    print(*faults, sep="\n")
    return 1 if faults else 0


sys.exit(main())
