"""Fails if the tests left anything on this machine.

    leftovers.py before BUILD   notes what there is
    leftovers.py after BUILD    names what has come since

It looks at processes that run a program of the build, /dev/shm, Lockstep's
temporary files and folders, and Unix sockets that carry Lockstep's name.
"""

import json
import os
import pathlib
import sys
import tempfile
import time


def processes(build):
    found = []
    ours = (str(build / "bin"), str(build / "libexec"))
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            program = os.readlink(entry / "exe")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue  # ended meanwhile, or not ours to see
        if program.startswith(ours):
            found.append(f"process {entry.name}: {command.decode().strip()}")
    return found


def files():
    folders = {"/dev/shm": "*", tempfile.gettempdir(): "*lockstep*"}
    return [
        f"file {path}"
        for folder, pattern in folders.items()
        for path in pathlib.Path(folder).glob(pattern)
    ]


def sockets():
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
    names = (line.split(maxsplit=7)[7:] for line in lines)
    return [f"socket {name[0]}" for name in names if name and "lockstep" in name[0]]


def main():
    moment, build = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    note = build / "leftovers.json"

    def look():
        return processes(build) + files() + sockets()

    if moment == "before":
        note.write_text(json.dumps(look()))
        return 0
    before = set(json.loads(note.read_text()))
    # A killed process needs a moment to go.
    for _ in range(20):
        left = [item for item in look() if item not in before]
        if not left:
            return 0
        time.sleep(0.1)
    print("The tests left behind:", *left, sep="\n  ")
    return 1


sys.exit(main())
