"""Starts the ranks of a test: processes that run one program."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

LOCKSTEP = pathlib.Path(sys.executable).parent / "lockstep"


def free_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


def environment_of(rank, size, port, **more):
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"),
            "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1",
            "RANK": str(rank), "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def leave():
    """Ends a rank that has used Gloo. Skips the interpreter's own shutdown, in
    which Gloo's threads sometimes abort the process ("terminate called without
    an active exception", 1 run of 26) after all is done."""
    sys.stdout.flush()
    os._exit(0)


def start(size, program, *arguments, **more):
    """Starts `size` ranks of a Python program. Returns their processes."""
    port = free_port()
    return [subprocess.Popen(
        [sys.executable, program, *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=environment_of(rank, size, port, **more)) for rank in range(size)]


def finish(processes, seconds=300):
    """Waits for the ranks. Returns what each wrote and its exit code."""
    ended = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=seconds)
            ended.append((process.returncode, output, errors))
    except subprocess.TimeoutExpired:
        texts = []
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            texts.append("\n".join(process.communicate()))
        raise AssertionError(f"the ranks did not end in {seconds} s:\n"
                             + "\n---\n".join(texts)) from None
    return ended


def run(test, size, program, *arguments, seconds=300, **more):
    """Runs a program on `size` ranks, all of which must end well."""
    for rank, (code, output, errors) in enumerate(
            finish(start(size, program, *arguments, **more), seconds)):
        test.assertEqual(code, 0, f"rank {rank}:\n{output}{errors}")
