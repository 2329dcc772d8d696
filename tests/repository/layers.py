"""Checks what the design says of files and includes (docs/internals/architecture.md).

    layers.py SOURCE

- A layer includes the layers above it in the table and nothing below; layers
  in one row do not include each other.
- The layers up to launch, the command, the protocol of shared memory and the
  readers of file formats include nothing of LibTorch; of launch one folder
  does, c10d, which is a module that is loaded when it is needed, and of the
  command the programs that a subcommand starts (TORCH_PROGRAMS).
- Headers that users may include (LOCKSTEP_PUBLIC_HEADERS) declare their names in
  lockstep, lockstep::nn, lockstep::optim or lockstep::metrics; all others in
  lockstep::internal and nowhere else. No header lets internal names in by a using-directive.
- Exceptions of LibTorch's types are made from their text alone: with a place in a
  source, as LibTorch's macros make them, what() ends with a backtrace.
"""

import pathlib
import re
import sys

# A layer may include layers of earlier rows and itself.
ROWS = [
    ["base"],
    ["trace", "state"],
    ["worker", "kernels"],
    ["launch"],
    ["comm"],
    ["data", "optim", "amp", "checkpoint", "metrics", "observe"],
    ["parallel"],
]
ALLOWED = {}
for index, row in enumerate(ROWS):
    above = [layer for earlier in ROWS[:index] for layer in earlier]
    for layer in row:
        ALLOWED[layer] = {layer, *above} - ({"launch"} - {layer})
ALLOWED["kernels"] = {"base", "kernels"}
ALLOWED["worker"] = {"base", "trace", "worker"}
ALLOWED["launch"] = {"base", "worker", "launch"}
ALLOWED["cli"] = {"base", "trace", "worker", "launch", "cli"}
# The folders of a layer: each may include those that stand before it. (Between
# the folders of parallel the targets see to it.)
FOLDERS = {"launch": ["process", "watch", "nodes", "agent"]}
WITHOUT_TORCH = {"base", "trace", "state", "worker", "kernels", "launch", "cli"}
TORCH_MODULES = {("launch", "nodes", "c10d")}
# Programs that a subcommand starts because it needs LibTorch: they may include
# all.
TORCH_PROGRAMS = {
    ("cli", "bench", "rank"),
    ("cli", "doctor", "torch"),
    ("cli", "inspect", "snapshot"),
}
# The part of comm that does not use LibTorch.
PLAIN = re.compile(r"lockstep/(kernels/|comm/shm/protocol/)")
# Other parts without LibTorch, which the sanitizers run.
FILES = ("data", "files")
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
                if other not in ALLOWED[layer]:
                    yield f"{path}:{number}: {layer} must not include {other}"
                folders = FOLDERS.get(layer, [])
                folder, included = parts[1], name.split("/")[2]
                if (other == layer and folder in folders and included in folders
                        and folders.index(included) > folders.index(folder)):
                    yield f"{path}:{number}: {folder} must not include {included}"
            elif ((layer in WITHOUT_TORCH and parts[:3] not in TORCH_MODULES
                   or PLAIN.match(f"lockstep/{'/'.join(parts)}")
                   or parts[:2] == FILES)
                  and re.match(r"(torch|ATen|c10|caffe2)/", name)):
                yield f"{path}:{number}: {layer} must not include LibTorch"
            elif name == "Python.h":
                yield f"{path}:{number}: Lockstep must not need Python"


def public_headers(source):
    text = (source / "cmake/LockstepHeaders.cmake").read_text()
    names = re.search(r"set\(LOCKSTEP_PUBLIC_HEADERS([^)]*)\)", text)[1].split()
    return {source / "lockstep" / name for name in names}


def check_namespaces(source):
    public = public_headers(source)
    for path in sorted(public):
        if not path.exists():
            yield f"{path}: is listed as public and is not there"
    for path in sorted((source / "lockstep").rglob("*.h")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            here = f"{path}:{number}"
            match = re.match(r"\s*(?:inline )?namespace (lockstep(?:::\w+)*) \{",
                             line)
            inside = match and match[1].startswith("lockstep::internal")
            if match and path not in public and not inside:
                yield (f"{here}: this header is not public, so its names belong "
                       "into lockstep::internal")
            if match and path in public and not inside and match[1] not in {
                    "lockstep", "lockstep::nn", "lockstep::optim",
                    "lockstep::metrics"}:
                yield f"{here}: {match[1]} is not a namespace of users"
            if re.match(r"\s*using namespace .*internal", line):
                yield f"{here}: lets internal names into another namespace"


def check_errors(source):
    for path in sorted((source / "lockstep").rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu"}:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\b(TORCH_(INTERNAL_ASSERT|CHECK)\w*\(|C10_\w*ERROR|"
                         r"__FILE__)", line):
                yield (f"{path}:{number}: throw c10::Error(text), or one of the "
                       "classes that derive from it")


def main():
    source = pathlib.Path(sys.argv[1])
    faults = [*check_includes(source), *check_namespaces(source),
              *check_errors(source)]
    print(*faults, sep="\n")
    return 1 if faults else 0


sys.exit(main())
