"""Counts the cases that a run of the tests passed, failed and skipped.

    summary.py BUILD

Reads GoogleTest's XML reports, a file for each program, in BUILD/test-results
(cmake/LockstepTest.cmake); the JSON of GoogleTest 1.12 lacks the reasons.
Prints the counts; for each reason why cases were skipped, the programs and how
many cases each; and why cases failed. Of a failed program that reported no such
case, because it crashed or is in Python, it prints the end of what ctest has
logged.
Python programs that crashed and were started again (python_peer.h) are listed
at the end.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

# How much of a failure is printed.
LINES = 15


def cases_of(report):
    return xml.etree.ElementTree.parse(report).iter("testcase")


def reason_of(case):
    """The first line of what GTEST_SKIP() was given."""
    for skipped in case.iter("skipped"):
        # "FILE:LINE\nMESSAGE"
        lines = skipped.get("message", "").split("\n", 1)[-1].strip().splitlines()
        if lines:
            return lines[0]
    return "no reason given"


def indented(lines):
    return "".join(f"    {line}\n" for line in lines)


def other_failures(build, told):
    """Yields the failed programs that are not in `told`, with the end of their
    output."""
    logs = build / "Testing" / "Temporary"
    failed = logs / "LastTestsFailed.log"
    if not failed.exists():
        return
    log = (logs / "LastTest.log").read_text(errors="replace")
    for line in failed.read_text().splitlines():
        name = line.partition(":")[2]
        if name in told:
            continue
        output = re.search(rf"^\d+/\d+ Testing: {re.escape(name)}$.*?^-{{58}}$(.*?)"
                           r"^<end of output>$", log, re.DOTALL | re.MULTILINE)
        yield name, output[1].strip().splitlines()[-LINES:] if output else []


def counted(number, noun):
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def main():
    build = pathlib.Path(sys.argv[1])
    results = build / "test-results"
    passed, failed, told = 0, [], set()
    skipped = collections.defaultdict(collections.Counter)
    reports = sorted(results.glob("*.xml"))
    for report in reports:
        for case in cases_of(report):
            if case.get("status") != "run":
                continue
            if case.get("result") == "skipped":
                skipped[reason_of(case)][report.stem] += 1
            elif case.find("failure") is not None:
                text = case.find("failure").get("message", "").splitlines()
                failed.append((f"{report.stem}: {case.get('classname')}.{case.get('name')}",
                               text[:LINES]))
                told.add(report.stem)
            else:
                passed += 1

    others = list(other_failures(build, told))
    more = f" and {counted(len(others), 'other program')}" if others else ""
    total = sum(count for by in skipped.values() for count in by.values())
    print(
        f"{counted(passed, 'case')} passed, {len(failed)} failed"
        f"{more}, "
        f"{total} skipped in {counted(len(reports), 'program')}"
    )
    for reason, programs in sorted(skipped.items()):
        names = ", ".join(f"{name} ({count})" for name, count in programs.items())
        print(f"  skipped: {reason}: {names}")
    for name, lines in failed + others:
        print(f"  failed: {name}\n{indented(lines)}", end="")
    crashes = results / "python_crashes.txt"
    for line in crashes.read_text().splitlines() if crashes.exists() else []:
        print(f"  {line}")


if __name__ == "__main__":
    main()
