"""Checks what `#include <lockstep/lockstep.h>` costs a user's source that has
included <torch/torch.h> already: few lines beside the 260,000 of LibTorch.

    include_lines.py COMPILER [-I... -isystem...]

10,200 lines more took GCC 12 1.0 s.
"""

import subprocess
import sys

MOST = 11_000


def lines(compiler, arguments, source):
    return subprocess.run(
        [compiler, "-std=c++20", *arguments, "-E", "-P", "-x", "c++", "-"],
        input=source, capture_output=True, text=True, check=True,
    ).stdout.count("\n")


def main():
    compiler, *arguments = sys.argv[1:]
    torch = "#include <torch/torch.h>\n"
    before = lines(compiler, arguments, torch)
    more = lines(compiler, arguments, torch + "#include <lockstep/lockstep.h>\n") - before
    print(f"{more} lines after the {before} of LibTorch")
    if not 0 < more <= MOST:
        sys.exit(f"lockstep.h may add {MOST} lines; include less in public headers")


main()
