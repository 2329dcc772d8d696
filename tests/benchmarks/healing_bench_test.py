"""The healing in `./dev bench launch`: what it makes of the files of its
processes and of figures, and that its program runs. The class Programs needs a
build, which LOCKSTEP_BUILD in the environment names."""

import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import healing
import launch
import processes

MS = 1_000_000


def one_round(healed, restart, torchft=None, plain_us=(100,), healed_us=(100,)):
    figures = {"healing": {"ms": healed, "step_ms": 10},
               "restart": {"ms": restart, "step_ms": 10},
               **{what: {"plain_us": plain_us, "healed_us": healed_us}
                  for what in healing.COSTS}}
    if torchft is not None:
        figures["torchft"] = {"ms": torchft, "step_ms": 50}
    return figures


class Summary(unittest.TestCase):
    def folder_of(self, **files):
        """Makes a folder with a file for each process, `r0_7` for process 7 of
        rank 0: its steps and when they ended, in ms."""
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        for name, steps in files.items():
            (folder / name[1:].replace("_", "-")).write_text("".join(
                f"{step} {ms * MS}\n" for step, ms in steps.items()))
        return folder

    def test_healing_ends_with_the_first_step_of_the_new_process(self):
        folder = self.folder_of(r0_7={1: 10, 2: 20, 3: 95, 4: 105},
                                r1_8={1: 11, 2: 21}, r1_9={3: 90, 4: 104})
        figures = healing.figures_of_kill(folder, 25 * MS, 8, 7, True)
        self.assertEqual(figures, {"ms": 70, "step_ms": 10})

    def test_a_step_that_the_new_process_was_given_is_not_its_first(self):
        folder = self.folder_of(r0_7={1: 10, 2: 20, 3: 30, 4: 99},
                                r1_8={1: 11, 2: 21}, r1_9={4: 98})
        figures = healing.figures_of_kill(folder, 25 * MS, 8, 7, True)
        self.assertEqual(figures["ms"], 74)

    def test_a_restart_ends_with_the_step_of_the_kill(self):
        folder = self.folder_of(
            r0_7={1: 10, 2: 20, 3: 30}, r1_8={1: 11, 2: 21, 3: 31},
            r0_5={2: 60, 3: 70, 4: 80}, r1_6={2: 60, 3: 70, 4: 81, 5: 90})
        figures = healing.figures_of_kill(folder, 31 * MS, 8, 7, False)
        self.assertEqual(figures, {"ms": 50, "step_ms": 10})

    def test_a_restart_does_not_count_as_healing(self):
        folder = self.folder_of(r0_7={1: 10, 2: 20}, r1_8={1: 11},
                                r0_5={2: 60}, r1_6={2: 60})
        with self.assertRaises(processes.Failure) as caught:
            healing.figures_of_kill(folder, 12 * MS, 8, 7, True)
        self.assertIn("rank 0 had 2 and rank 1 1 processes",
                      str(caught.exception))

    def test_a_line_that_is_not_whole_does_not_count(self):
        folder = self.folder_of(r1_8={1: 10})
        with open(folder / "1-8", "a") as file:
            file.write("2 1")
        self.assertEqual(healing.steps_of(folder, 1), {8: {1: [10 * MS]}})

    def test_ratios_are_taken_within_rounds(self):
        results = healing.summarise([one_round(50, 500, 1000),
                                     one_round(100, 1100, 900),
                                     one_round(60, 1200, 1200)])
        self.assertEqual(results["healing_ms"], 50)
        self.assertEqual(results["sides"]["restart"]["ratio"], 11)
        self.assertEqual(results["sides"]["torchft"]["ratio"], 20)
        self.assertEqual([met for *_, met in healing.targets(results)],
                         [True] * 5)
        text = "\n".join(healing.table(results))
        self.assertIn("| 1000.0 ms | 900.0–1200.0 ms | 20.0× | 50.0 ms |", text)

    def test_what_is_missed_is_said(self):
        results = healing.summarise(
            [one_round(80, 790, plain_us=(100, 1000, 200),
                       healed_us=(102, 1020, 200))])
        self.assertEqual([met for *_, met in healing.targets(results)],
                         [False] * 4)
        self.assertNotIn("torchft", results["sides"])

    def test_torchft_that_cannot_be_installed_is_one_line(self):
        notes = []
        failed = mock.Mock(returncode=1, stderr="no such version\n")
        with (tempfile.TemporaryDirectory() as build,
              mock.patch.object(healing.subprocess, "run",
                                return_value=failed)):
            self.assertIsNone(healing.torchft_packages(build, notes.append))
        self.assertEqual(len(notes), 1)
        self.assertIn("torchft is left out", notes[0])
        self.assertIn("failed: no such version", notes[0])


@unittest.skipUnless("LOCKSTEP_BUILD" in os.environ, "no build is named")
class Programs(unittest.TestCase):
    def test_a_killed_rank_heals_restarts_and_a_step_has_a_cost(self):
        build = pathlib.Path(os.environ["LOCKSTEP_BUILD"])
        figures = healing.measure_round(
            launch.find_launchers(build),
            build / "bin" / "benchmarks" / "healing", None, True)
        for side in ("healing", "restart"):
            self.assertGreater(figures[side]["ms"], 0)
            self.assertGreater(figures[side]["step_ms"], 0)
        for what in healing.COSTS:
            self.assertGreater(figures[what]["healed_us"][0], 0)
            self.assertGreater(figures[what]["plain_us"][0], 0)


if __name__ == "__main__":
    unittest.main()
