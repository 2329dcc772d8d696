"""`./dev bench observe`: what it makes of figures, and that its program runs.
The class Programs needs a build, which LOCKSTEP_BUILD in the environment
names."""

import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import observe
import processes
import training


def blocks(nothing, **ways):
    return {"nothing": nothing, **ways}


class Summary(unittest.TestCase):
    def test_a_block_is_compared_with_the_one_beside_it(self):
        one = observe.summarise("mlp", 10, [
            blocks([100, 1000, 200], logs=[101, 1010, 204]),
            blocks([100, 100, 100], logs=[101, 101, 90])])
        logs = one["ways"]["logs"]
        self.assertEqual(logs["ratio"], 1.01)
        self.assertTrue(logs["target_met"])
        self.assertEqual(one["ways"]["nothing"]["step_us"], 10.0)

    def test_more_than_a_hundredth_is_missed(self):
        one = observe.summarise("mlp", 10, [
            blocks([100, 100], logs=[102, 103], profiler=[150, 150])])
        self.assertFalse(one["ways"]["logs"]["target_met"])
        self.assertNotIn("target", one["ways"]["profiler"])
        text = observe.table([one])
        self.assertIn("| mlp | logs | 10.25 us | 1.025 | ", text)
        self.assertIn("MISSED", text)


class Programs(unittest.TestCase):
    def test_every_way_has_figures(self):
        with (tempfile.TemporaryDirectory(prefix="lockstep-bench-") as scratch,
              mock.patch.object(observe, "MODELS", {"tutorial": 110})):
            place = training.Place(
                processes.Programs(pathlib.Path(os.environ["LOCKSTEP_BUILD"])),
                pathlib.Path(scratch), None, True)
            results = observe.measure(1, place, lambda _: None)
            folder = pathlib.Path(scratch) / "observe"
            self.assertTrue(list(folder.glob("traces/*.json")))
            self.assertIn("loss", (folder / "metrics.csv").read_text())
        ways = results[0]["ways"]
        self.assertEqual(list(ways), ["logs", "nothing", "profiler", "watched"])
        for way in ways.values():
            self.assertGreater(way["step_us"], 0)


if __name__ == "__main__":
    unittest.main()
