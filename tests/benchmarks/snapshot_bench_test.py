"""`./dev bench snapshot`: what it makes of figures, what it says if something is
missing, and that nothing stays in memory. The class Programs needs torch, and a
build, which LOCKSTEP_BUILD in the environment names."""

import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import processes
import snapshot
import training


def figures_of(**sides):
    """Returns the rounds of sides from the seconds of each round."""
    return {name: [{"seconds": one, "bytes": 1000, "peak_bytes": 1050}
                   for one in seconds] for name, seconds in sides.items()}


def ratio(results, name):
    return next(one for one in results["ratios"] if one["name"] == name)


class Summary(unittest.TestCase):
    def test_ratios_are_taken_within_rounds(self):
        results = snapshot.summarise(1000, figures_of(
            plain_write=[1, 10, 2], save_1=[1.05, 13, 2.1]))
        one = ratio(results, "save_1_by_plain_write")
        self.assertEqual((one["value"], one["min"], one["max"]),
                         (1.05, 1.05, 1.3))
        self.assertTrue(one["target_met"])

    def test_targets_have_a_direction(self):
        results = snapshot.summarise(1000, figures_of(
            plain_write=[1], save_1=[1.2], save_2=[1], torch_save=[1.5],
            dcp=[1.9], load_mapped=[0.004], load=[1]))
        met = {one["name"]: one["target_met"] for one in results["ratios"]
               if "target_met" in one}
        self.assertEqual(met, {
            "save_1_by_plain_write": False, "torch_save_by_save_2": True,
            "dcp_by_save_2": False, "load_mapped_ms": True,
            "load_peak_by_model": True})
        self.assertEqual(ratio(results, "load_mapped_ms")["value"], 4)
        self.assertEqual(ratio(results, "load_peak_by_model")["value"], 1.05)

    def test_a_missing_side_has_no_ratio(self):
        results = snapshot.summarise(1000, figures_of(save_2=[1]))
        one = ratio(results, "overlapped_stall_by_save_2")
        self.assertEqual(one, {
            "name": "overlapped_stall_by_save_2",
            "target": {"at_most": 0.05},
            "what": "ours, overlap_copy: async stall / synchronous save"})
        text = snapshot.table(results)
        self.assertIn("| ours, overlap_copy: async stall / synchronous save "
                      "| - | - | <= 0.05 |", text)
        self.assertIn("| ours, 2 ranks: save | 1,000 ms | 0.00 | 1,000 ms |",
                      text)

    def test_the_stall_is_compared_and_not_the_end(self):
        figures = figures_of(dcp=[2], dcp_async=[3])
        figures["dcp_async"][0]["stall_seconds"] = 1
        self.assertEqual(ratio(snapshot.summarise(1000, figures),
                               "dcp_async_stall_by_dcp")["value"], 0.5)


class Place(unittest.TestCase):
    def test_the_folder_is_removed_after_an_error(self):
        with tempfile.TemporaryDirectory() as tmpfs:
            with self.assertRaises(KeyError):
                with snapshot.folder_in_memory(1, tmpfs) as folder:
                    (folder / "file").write_text("content")
                    raise KeyError
            self.assertEqual(os.listdir(tmpfs), [])

    def test_too_little_room_is_one_line(self):
        usage = types.SimpleNamespace(free=3 << 20)
        with (mock.patch.object(snapshot.shutil, "disk_usage",
                                return_value=usage),
              self.assertRaises(processes.Failure) as caught):
            with snapshot.folder_in_memory(1 << 20):
                pass
        self.assertIn("has 3 MiB free, and the benchmark needs 4 MiB",
                      str(caught.exception))

    def test_a_missing_file_system_is_one_line(self):
        with self.assertRaises(processes.Failure) as caught:
            with snapshot.folder_in_memory(1, "/nonexistent"):
                pass
        self.assertIn("/nonexistent cannot be used", str(caught.exception))

    def test_a_missing_package_is_one_line(self):
        notes = []
        with mock.patch.object(snapshot.importlib.util, "find_spec",
                               return_value=None):
            names = [side.name for side in snapshot.sides_here(notes.append)]
        self.assertNotIn("dcp_safetensors", names)
        self.assertIn("dcp", names)
        self.assertEqual(len(notes), 1)
        self.assertIn("pip install --no-deps safetensors", notes[0])


@unittest.skipUnless("LOCKSTEP_BUILD" in os.environ, "no build is named")
@unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class Programs(unittest.TestCase):
    """Runs the programs that are one process."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        tmpfs = tempfile.TemporaryDirectory(dir=snapshot.TMPFS)
        self.addCleanup(scratch.cleanup)
        self.addCleanup(tmpfs.cleanup)
        self.tmpfs = tmpfs.name
        self.place = training.Place(
            processes.Programs(pathlib.Path(os.environ["LOCKSTEP_BUILD"])),
            pathlib.Path(scratch.name), None, True)

    def measure(self, sides):
        with mock.patch.object(snapshot, "SIDES", sides):
            return snapshot.measure(1, self.place, lambda _: None, self.tmpfs)

    def test_every_side_of_one_process_has_figures(self):
        sides = [side for side in snapshot.SIDES if side.ranks == 1]
        results = self.measure(sides)
        self.assertEqual(os.listdir(self.tmpfs), [])
        self.assertEqual([side["name"] for side in results["sides"]],
                         ["plain_write", "save_1", "torch_save", "load",
                          "load_mapped", "torch_load"])
        for side in results["sides"]:
            self.assertGreater(side["seconds"], 0)
            # All have saved or loaded the same model.
            self.assertEqual(side["rounds"][0]["bytes"], snapshot.QUICK_BYTES)
        for name in ("load", "torch_load"):
            side = next(one for one in results["sides"] if one["name"] == name)
            self.assertGreater(side["peak_bytes"], snapshot.QUICK_BYTES)

    def test_a_program_that_fails_leaves_nothing(self):
        bad = dataclasses.replace(snapshot.SIDES[0], do="nothing")
        with (contextlib.redirect_stderr(io.StringIO()),
              self.assertRaises(processes.Failure) as caught):
            self.measure([bad])
        self.assertIn("--do nothing", str(caught.exception))
        self.assertEqual(os.listdir(self.tmpfs), [])


if __name__ == "__main__":
    unittest.main()
