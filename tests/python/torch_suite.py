"""Runs PyTorch's own tests of torch.distributed with a backend.

Usage: torch_suite.py BACKEND [--ranks=N] [--json=FILE] [PATTERN...]

The tests are those of torch/testing/_internal/distributed/distributed_test.py,
which torch's wheel contains; each runs on N ranks (3). A PATTERN is a part of
a test's name; the default is all tests. Prints a line for each test and a line
with the counts, writes the tests to FILE, and fails if a test fails.

The ranks are forked, so that each test does not import torch again. Tests that
PyTorch skips for all backends but Gloo or MPI, because others lack what they
test, are run for every backend other than Gloo.
"""

import argparse
import collections
import importlib.util
import json
import logging
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import types
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("backend")
parser.add_argument("--ranks", type=int, default=3)
parser.add_argument("--json")
parser.add_argument("patterns", nargs="*")
arguments = parser.parse_intermixed_args()

if importlib.util.find_spec("expecttest") is None:
    print("skipped: PyTorch's tests need the package expecttest")
    sys.exit(77)
os.environ["BACKEND"] = arguments.backend
os.environ["WORLD_SIZE"] = str(arguments.ranks)
os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-suite-")
os.environ["INIT_METHOD"] = f"file://{os.environ['TEMP_DIR']}/init"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.testing._internal.distributed as package  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402


class Name(str):
    """The name of a backend for which tests for Gloo and MPI are not skipped."""

    def __eq__(self, other):
        return str.__eq__(self, other) or other in ("gloo", "mpi")

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


# The tests' words are Gloo's; the values are what Lockstep says instead. torch
# itself logs a backend that is not its own as "custom".
WORDS = {
    'BACKEND = os.environ["BACKEND"]': "BACKEND = NAME",
    '" (Timed out|closed|timeout) "': 'r"has not come to barrier .*allowed"',
    'f"Rank {failed_rank} failed to pass monitoredBarrier"':
        'f"rank {failed_rank} did not come in time"',
    'f"Rank {self.rank} successfully reached monitoredBarrier,"':
        '"did not come in time"',
    'f" but received errors while waiting for send/recv from rank"': '""',
    'f" {src_rank}"': '""',
    'f"Ranks {rank_str} failed to pass monitoredBarrier"':
        'f"rank {rank_str} did not come in time"',
    'f"Rank {expected_first_failed_rank}"':
        'f"rank {expected_first_failed_rank}"',
    'f"Rank {self.rank} timed out in monitoredBarrier"': '"did not come in time"',
    'ddp_logging_data.get("backend_name"), dist.get_backend(group_id)':
        'ddp_logging_data.get("backend_name"), "custom"',
}


def load_tests_of_torch():
    """Returns PyTorch's module, whose tests ask for this backend."""
    path = pathlib.Path(package.__path__[0]) / "distributed_test.py"
    text = path.read_text()
    name = "distributed_test"
    module = sys.modules[name] = types.ModuleType(name)
    if arguments.backend != "gloo":
        module.NAME = Name(arguments.backend)
        for words, ours in WORDS.items():
            if words not in text:
                sys.exit(f"{path} does not have {words}")
            text = text.replace(words, ours)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


logging.getLogger(common_distributed.__name__).setLevel(logging.WARNING)
common_distributed.DistTestCases.backend_feature["plugin"].add(
    arguments.backend)
distributed_test = load_tests_of_torch()

class TorchSuite(distributed_test.TestDistBackend,
                 distributed_test.DistributedTest._DistTestBase):

    def setUp(self):
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)


class Result(unittest.TestResult):

    def __init__(self):
        super().__init__()
        self.outcomes = {}

    def startTest(self, test):
        super().startTest(test)
        self.begun = time.monotonic()

    def note(self, test, outcome, text=""):
        name = test._testMethodName
        self.outcomes[name] = {"outcome": outcome, "text": text}
        line = text.strip().splitlines()[-1] if text else ""
        print(f"{outcome:8}{time.monotonic() - self.begun:6.1f} s  {name}"
              f"{': ' if line else ''}{line}", flush=True)

    def addSuccess(self, test):
        self.note(test, "passed")

    def addSkip(self, test, reason):
        self.note(test, "skipped", reason)

    def addError(self, test, error):
        self.note(test, "failed", self._exc_info_to_string(error, test))

    addFailure = addError


names = [name for name in unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
         if not arguments.patterns
         or any(pattern in name for pattern in arguments.patterns)]
result = Result()
unittest.TestSuite(TorchSuite(name) for name in names).run(result)
counts = collections.Counter(each["outcome"]
                             for each in result.outcomes.values())
print(f"{arguments.backend}, {arguments.ranks} ranks: "
      + ", ".join(f"{counts[outcome]} {outcome}"
                  for outcome in ("passed", "skipped", "failed")))
if arguments.json:
    with open(arguments.json, "w") as file:
        json.dump(result.outcomes, file, indent=1)
sys.exit(counts["failed"] > 0 or not result.outcomes)
