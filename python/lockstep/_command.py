"""The command `lockstep`, which lies beside this file."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(__file__), "bin", "lockstep")
    try:
        os.execv(program, ["lockstep", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"lockstep: {program}: {error.strerror}; install "
                 "lockstep-torch again")
