"""Runs a test in the environment of install_wheel.py, with a folder of its own.

Usage: in_wheel.py FOLDER TEST [ARGUMENT...]

Ends with 77, by which ctest knows a skipped test, if the environment is missing.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

python = pathlib.Path(sys.argv[1]) / "bin" / "python"
if not python.exists():
    print("skipped: lockstep-torch was not installed (test python_wheel)")
    sys.exit(77)
with tempfile.TemporaryDirectory(prefix="lockstep-python-") as folder:
    sys.exit(subprocess.run([python, *sys.argv[2:]],
                            env={**os.environ, "TMPDIR": folder}).returncode)
