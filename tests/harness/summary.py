"""Counts the cases that a run of the tests passed, failed and skipped.

    summary.py RESULTS

RESULTS is the folder of GoogleTest's XML reports, a file for each program
(cmake/LockstepTest.cmake); the JSON of GoogleTest 1.12 lacks the reasons.
Prints the counts and, for each reason why cases were skipped, the programs and
how many cases each. A program that crashed has written no report: ctest reports
it. Python programs that crashed and were started again (python_peer.h) are
listed at the end.
"""

import collections
import pathlib
import sys
import xml.etree.ElementTree


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


def counted(number, noun):
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def main():
    passed, failed = 0, []
    skipped = collections.defaultdict(collections.Counter)
    reports = sorted(pathlib.Path(sys.argv[1]).glob("*.xml"))
    for report in reports:
        for case in cases_of(report):
            if case.get("status") != "run":
                continue
            if case.get("result") == "skipped":
                skipped[reason_of(case)][report.stem] += 1
            elif case.find("failure") is not None:
                failed.append(f"{report.stem}: {case.get('classname')}.{case.get('name')}")
            else:
                passed += 1

    total = sum(count for by in skipped.values() for count in by.values())
    print(
        f"{counted(passed, 'case')} passed, {len(failed)} failed, "
        f"{total} skipped in {counted(len(reports), 'program')}"
    )
    for reason, programs in sorted(skipped.items()):
        names = ", ".join(f"{name} ({count})" for name, count in programs.items())
        print(f"  skipped: {reason}: {names}")
    for name in failed:
        print(f"  failed: {name}")
    crashes = pathlib.Path(sys.argv[1]) / "python_crashes.txt"
    for line in crashes.read_text().splitlines() if crashes.exists() else []:
        print(f"  {line}")


if __name__ == "__main__":
    main()
