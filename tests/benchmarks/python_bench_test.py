"""`./dev bench python`: what it makes of figures, and that its peer runs. The
class Wheel runs in the environment of install_wheel.py (tests/python)."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import python

IMPORTS = {"with": [4, 6, 5], "without": [1, 1, 2]}
FAKE_CALLS = [12, 10, 14]


def rounds(*medians):
    return [{"median_ms": one, "p90_ms": one} for one in medians]


def sizes(**changed):
    """Returns one size, of 4 bytes, with microseconds of each round."""
    return {4: {"lockstep": [1.0, 1.0, 2.0], "python-lockstep": [4.0, 9.0, 5.0],
                "python": [100, 200, 50], **changed}}


class Summary(unittest.TestCase):
    def test_ratios_have_directions(self):
        results = python.summarise(
            {"ddp_mlp": {"lockstep": rounds(10, 20, 30),
                         "gloo": rounds(20, 50, 30),
                         "no_hook": rounds(10, 10, 30)}}, sizes(), FAKE_CALLS,
            IMPORTS, {})
        hook, gloo = results["steps"][0]["ratios"]
        self.assertEqual((hook["value"], hook["target_met"]), (1.0, True))
        self.assertEqual((gloo["value"], gloo["target_met"]), (2.0, True))
        text = python.table(results)
        self.assertIn("| DDP, mlp | 20.0 ms | a no-op hook | 10.0 ms | "
                      "lockstep / a no-op hook | 1.00 (1.00-2.00) met | <= 1.1 |",
                      text)
        self.assertIn("| DDP, mlp | 20.0 ms | Gloo | 30.0 ms | "
                      "Gloo / lockstep | 2.00 (1.00-2.50) met | >= 1.5 |", text)

    def test_what_python_adds_is_taken_within_rounds(self):
        results = python.summarise({}, sizes(), FAKE_CALLS, IMPORTS, {})
        size = results["all_reduce"][0]
        self.assertEqual(size["overhead_us"], 3.0)  # of 3, 8 and 3
        self.assertTrue(size["overhead_target_met"])
        self.assertEqual(size["ratios"][0]["value"], 22.222)
        self.assertIn("| 4 B | 1.0 us | 5.0 us | 3.0 us met | <= 4 us | 100 us | "
                      "22.22 (10.00-25.00) met | >= 20 |", python.table(results))

    def test_large_sizes_have_no_target_for_what_python_adds(self):
        figures = {8 << 20: {"lockstep": [1000], "python-lockstep": [1100],
                             "python": [2000], "openmpi": [1100]},
                   1 << 20: {"lockstep": [100], "python-lockstep": [110],
                             "python": [200], "openmpi": [110]}}
        results = python.summarise({}, figures, FAKE_CALLS, IMPORTS, {})
        text = python.table(results)
        self.assertIn("| 8 MiB | 1000 us | 1100 us | 100.0 us |  | 2000 us | "
                      "1.82 (1.82-1.82) MISSED | >= 4 | 1100 us | "
                      "1.10 (1.10-1.10) MISSED | >= 1.2 |", text)
        self.assertIn("| 1 MiB | 100 us | 110 us | 10.0 us |  | 200 us | "
                      "1.82 (1.82-1.82) |  | 110 us | 1.10 (1.10-1.10) |  |",
                      text)

    def test_what_is_left_out_is_said(self):
        results = python.summarise(
            {"decode_float32_1": {"lockstep": rounds(1), "gloo": rounds(3)}},
            sizes(), FAKE_CALLS, IMPORTS, {"DeepSpeed": "no compiler", "OpenMPI": ""})
        self.assertEqual(len(results["steps"][0]["ratios"]), 1)
        self.assertEqual(results["left_out"], {"DeepSpeed": "no compiler"})
        text = python.table(results)
        self.assertIn("without DeepSpeed: no compiler", text)
        results = python.summarise(
            {"decode_bfloat16_1": {"lockstep": rounds(1), "gloo": rounds(3)}},
            sizes(), FAKE_CALLS, IMPORTS, {"DeepSpeed": ""})
        self.assertIn("decoding, bfloat16, batch 1: its operation needs",
                      results["left_out"]["DeepSpeed"])
        text = python.table(results)
        self.assertIn("that does nothing: 12.0 us\n", text)
        self.assertIn("installed: 4.0 ms more; target <= 5 ms met", text)


class Wheel(unittest.TestCase):
    def test_every_case_has_figures_for_each_side(self):
        # The wheel's command starts the ranks, as a user's would.
        done = subprocess.run(
            [pathlib.Path(sys.executable).parent / "lockstep", "run",
             "--standalone", "--nproc-per-node=2", sys.executable,
             python.PEERS / "python_peer.py", "--quick", "--rounds=1"],
            text=True, capture_output=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        cases = {case["name"]: case["sides"]
                 for case in json.loads(done.stdout)["cases"]}
        self.assertEqual(list(cases), list(python.CASES))
        for name, case in python.CASES.items():
            wanted = {side for ratio in case.ratios
                      for side in (ratio.over, ratio.under)} - {"deepspeed"}
            self.assertEqual(set(cases[name]), wanted, name)
            for side in wanted:
                self.assertGreater(cases[name][side][0]["median_ms"], 0)


if __name__ == "__main__":
    unittest.main()
