"""Breaks the code on purpose and says which test notices.

    mutate.py --source S --build B [--torch T] [NAME...]
    mutate.py --source S --check

Takes the mutations of mutations.toml whose name contains one of NAME, or all.
Works on a copy of the sources, B/source, with a build of its own in B/build,
which is kept for the next time. Each test must pass on the copy as it is; then
each mutation is applied alone, its test program built and run, and undone.
Prints the cases that failed. Ends with 1 if a mutation survived.

--check builds nothing: it ends with 1 if a mutation does not fit the sources any
more.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tomllib

# A mutation may make a test hang, so each test has this limit.
TEST_SECONDS = 300


class Mutation:
    def __init__(self, entry):
        self.name = entry["name"]
        self.breaks = entry["breaks"]
        self.file = entry["file"]
        self.old = entry["old"]
        self.new = entry["new"]
        self.test = entry["test"]
        self.filter = entry.get("filter", "*")
        # Programs that the test starts but that are not built with it.
        self.programs = entry.get("programs", [])

    def mistakes(self, source):
        path = source / self.file
        if not path.exists():
            return [f"{self.name}: there is no {self.file}"]
        count = path.read_text().count(self.old)
        if count != 1:
            return [f"{self.name}: its old text stands {count} times in {self.file}"]
        return []

    def applied_to(self, text):
        return text.replace(self.old, self.new)


def load(source):
    text = (source / "tests/mutations/mutations.toml").read_text()
    return [Mutation(entry) for entry in tomllib.loads(text)["mutation"]]


def copy_sources(source, copy):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=source, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
    for name in listed:
        have, want = copy / name, source / name
        if not want.is_file():
            continue
        if have.exists() and have.read_bytes() == want.read_bytes():
            continue  # keeps its time, so it is not compiled again
        have.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(want, have)
    kept = set(listed)
    for path in copy.rglob("*"):
        if path.is_file() and str(path.relative_to(copy)) not in kept:
            path.unlink()


class Tests:
    def __init__(self, copy, build, torch):
        self.copy, self.build, self.torch = copy, build, torch

    def configure(self):
        if (self.build / "build.ninja").exists():
            return
        command = ["cmake", "-G", "Ninja", "-S", self.copy, "-B", self.build,
                   "-DCMAKE_CXX_FLAGS=-O1", "-DLOCKSTEP_BUILD_BENCHMARKS=OFF"]
        if self.torch:
            command.append(f"-DCMAKE_PREFIX_PATH={self.torch}")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def make(self, targets):
        """The end of the compiler's output if it fails."""
        done = subprocess.run(["cmake", "--build", self.build, "--target", *targets],
                              capture_output=True, text=True)
        return None if done.returncode == 0 else done.stdout[-2000:]

    def failures(self, mutation):
        """The failed cases, or what else went wrong; empty if all passed."""
        report = self.build / "mutation.json"
        report.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                [self.build / "bin/tests" / mutation.test,
                 f"--gtest_filter={mutation.filter}", f"--gtest_output=json:{report}"],
                capture_output=True, text=True, timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"no end within {TEST_SECONDS} s"]
        if not report.exists():
            return [f"ended with {done.returncode}"]
        cases = [case for suite in json.loads(report.read_text())["testsuites"]
                 for case in suite["testsuite"] if case["status"] == "RUN"]
        if not cases:
            return [f"no case is called {mutation.filter}"]
        return [f"{case['classname']}.{case['name']}"
                for case in cases if case.get("failures")]


def run(mutations, tests, source):
    targets = {m.test for m in mutations}.union(*(m.programs for m in mutations))
    print(f"building {', '.join(sorted(targets))}", flush=True)
    if error := tests.make(sorted(targets)):
        sys.exit(f"the copy does not build:\n{error}")
    for test, filtered in sorted({(m.test, m.filter) for m in mutations}):
        one = next(m for m in mutations if (m.test, m.filter) == (test, filtered))
        if failed := tests.failures(one):
            sys.exit(f"{test} fails on the sources as they are: {failed[0]}")

    survivors = []
    for mutation in mutations:
        path = tests.copy / mutation.file
        text = path.read_text()
        path.write_text(mutation.applied_to(text))
        try:
            error = tests.make([mutation.test, *mutation.programs])
            failed = None if error else tests.failures(mutation)
        finally:
            path.write_text(text)
        if error:
            sys.exit(f"{mutation.name} does not compile:\n{error}")
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            verdict = f"caught by {failed[0]}{more}"
        else:
            verdict = "SURVIVED"
            survivors.append(mutation.name)
        print(f"{mutation.name}: {mutation.breaks}\n    {verdict}", flush=True)
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} caught")
    return bool(survivors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--torch")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()

    source = arguments.source.resolve()
    mutations = load(source)
    mistakes = [text for m in mutations for text in m.mistakes(source)]
    if mistakes or arguments.check:
        print(*mistakes, sep="\n")
        return bool(mistakes)
    if arguments.names:
        mutations = [m for m in mutations if any(n in m.name for n in arguments.names)]
        if not mutations:
            sys.exit(f"no mutation is called {' or '.join(arguments.names)}")
    build = arguments.build.resolve()
    tests = Tests(build / "source", build / "build", arguments.torch)
    copy_sources(source, tests.copy)
    tests.configure()
    return run(mutations, tests, source)


sys.exit(main())
