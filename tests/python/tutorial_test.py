"""The tutorial's programs (tutorial.py) with the backend's name changed: under
`lockstep run` and under torchrun, on one node and on two, with a rank that is
killed. Each ends with the parameters that Gloo gives without a failure."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import ranks

PROGRAM = str(pathlib.Path(__file__).with_name("tutorial.py"))
EPOCHS = 6
LAUNCHERS = {"lockstep": [str(ranks.LOCKSTEP), "run"],
             "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def start(*command):
    environment = {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"), "TMPDIR": tempfile.gettempdir(),
        "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(word) for word in command], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, env=environment)


class Tutorial(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.expected = cls.digest_of(
            cls(), cls.multigpu("gloo", cls.new_snapshot()))

    @staticmethod
    def new_snapshot():
        return os.path.join(tempfile.mkdtemp(), "snapshot.pt")

    @staticmethod
    def arguments(program, snapshot, *more, backend="lockstep"):
        return [PROGRAM, program, EPOCHS, 1, "--backend", backend,
                "--snapshot", snapshot, *more]

    @classmethod
    def multigpu(cls, backend, snapshot):
        return ranks.finish([start(sys.executable, *cls.arguments(
            "multigpu", snapshot, "--port", ranks.free_port(),
            backend=backend))])

    def digest_of(self, ended, began_with=None):
        """Returns the digest of the job's parameters, which rank 0 has printed
        once. All launchers have ended well."""
        output = "".join(text for _, text, _ in ended)
        self.assertEqual([code for code, _, _ in ended], [0] * len(ended),
                         output + "".join(errors for _, _, errors in ended))
        (began, digest), = re.findall(r"began with (\d+) digest (\w+)", output)
        if began_with is not None:
            self.assertIn(int(began), began_with)
        return digest

    def test_one_process(self):
        snapshot = self.new_snapshot()
        self.digest_of(ranks.finish([start(sys.executable, *self.arguments(
            "single_gpu", snapshot))]))
        self.assertTrue(os.path.exists(snapshot))

    def test_a_program_that_starts_its_ranks(self):
        self.assertEqual(
            self.digest_of(self.multigpu("lockstep", self.new_snapshot())),
            self.expected)

    def test_a_killed_rank_goes_on_from_the_snapshot(self):
        for name, launcher in LAUNCHERS.items():
            with self.subTest(launcher=name):
                ended = ranks.finish([start(
                    *launcher, "--standalone", "--nproc-per-node=2",
                    "--max-restarts=1", *self.arguments(
                        "multigpu_torchrun", self.new_snapshot(),
                        "--kill-at", 4))])
                # Rank 0 may have been ended before it had saved the last epoch.
                self.assertEqual(self.digest_of(ended, began_with=(3, 4)),
                                 self.expected)

    def test_a_job_that_was_ended_is_started_again(self):
        command = [*LAUNCHERS["lockstep"], "--standalone", "--nproc-per-node=2",
                   *self.arguments("multigpu_torchrun", self.new_snapshot())]
        (code, _, errors), = ranks.finish([start(*command, "--kill-at", 4)])
        self.assertNotEqual(code, 0, errors)
        self.assertEqual(
            self.digest_of(ranks.finish([start(*command)]), (3, 4)),
            self.expected)

    def two_nodes(self, launcher, *more):
        snapshot = self.new_snapshot()
        endpoint = f"127.0.0.1:{ranks.free_port()}"
        return ranks.finish([start(
            *launcher, "--nnodes=2", f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=tutorial", "--nproc-per-node=1", "--max-restarts=1",
            *more, *self.arguments("multinode", snapshot, "--kill-at", 4))
            for _ in range(2)])

    def test_two_nodes_one_of_which_loses_its_rank(self):
        for name, more in (("lockstep", ["--rdzv-insecure"]),
                           ("torchrun", ["--rdzv-backend=c10d"])):
            with self.subTest(launcher=name):
                self.assertEqual(
                    self.digest_of(self.two_nodes(LAUNCHERS[name], *more),
                                   (3, 4)), self.expected)


if __name__ == "__main__":
    unittest.main()
