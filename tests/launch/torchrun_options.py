"""The table of torchrun's options in docs/torchrun.md beside the installed torch
and beside `lockstep run --help`.

    torchrun_options.py PAGE LOCKSTEP

Each option of torchrun has a row and is an option of `lockstep run`, and both
have the default that the row says. A row is

    | `-r` `--redirects` | `0` | supported | ... |

with "`none`; here random" as the second cell if the defaults differ, and "–" for
no default. The third cell is "supported", "in part", "no effect" or "refused".
"""

import pathlib
import re
import subprocess
import sys

from torch.distributed.run import get_args_parser

STATES = {"supported", "in part", "no effect", "refused"}


def rows(page):
    """(option names, default, state) of each row of the table."""
    text = pathlib.Path(page).read_text()
    section = text.split("\n## Options of torchrun\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `-"):
            yield tuple(re.findall(r"`(-[\w-]+)`", cells[0])), *cells[1:3]


def helped(text):
    """{name: (takes a value, default or "–")} of what a help lists."""
    options, entry = {}, ""
    for line in text.splitlines() + [""]:
        # An option's text may go on in lines that are indented further.
        if re.match(r"\s+[^-\s]", line):
            entry += " " + line.strip()
            continue
        head = re.match(r"\s*((?:-[\w-]+(?:, )?)+)( VALUE)?", entry)
        if head:
            default = re.search(r"\[(.+)\]$", entry.strip())
            for name in head[1].split(", "):
                options[name] = (bool(head[2]), default[1] if default else "–")
        entry = line.strip()
    return options


def mistakes(page, lockstep):
    table = {names: rest for names, *rest in rows(page)}
    ours = helped(subprocess.run([lockstep, "run", "--help"], text=True,
                                 capture_output=True, check=True).stdout)
    for action in get_args_parser()._actions:
        names = tuple(name for name in action.option_strings if "_" not in name)
        if not names or "--help" in names:
            continue
        if names not in table:
            yield f"no row for {names}"
            continue
        default, state = table.pop(names)
        empty = (action.default is None or action.default is False
                 or action.default in ("", []))
        expected = "–" if empty else f"`{action.default}`"
        theirs, _, here = default.partition("; here ")
        if theirs != expected:
            yield f"{names}: the default is {expected}, the table has {theirs}"
        if state not in STATES:
            yield f"{names}: no state {state!r}"
        for name in names:
            if name not in ours:
                yield f"lockstep run has no {name}"
                continue
            takes_value, help_default = ours[name]
            if takes_value == (action.nargs == 0):
                yield f"{name}: only one of the two takes a value"
            if help_default != (here or theirs.strip("`")):
                yield f"{name}: the help's default is {help_default}"
    for names in table:
        yield f"{names} is not an option of torchrun"


found = list(mistakes(*sys.argv[1:]))
print("\n".join(found))
sys.exit(1 if found else 0)
