"""`./dev bench sharded`: what it makes of figures, and that its programs train
the same model. The class Programs needs torch, and a build, which
LOCKSTEP_BUILD in the environment names."""

import importlib.util
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import processes
import sharded
import training

LIMITED = [{"name": "ddp", "what": "ours, DDP", "needed_mib": 9, "limit_mib": 5,
            "trains": False, "line": "rank 0: out of memory: 1 MiB"},
           {"name": "fsdp", "what": "ours, FSDP", "needed_mib": 9,
            "limit_mib": 5, "trains": True}]


def figures_of(losses=None, **sides):
    """Returns the rounds of sides from the milliseconds of each round; sides
    that are not named take 10 ms."""
    losses = losses or {}
    rounds = max(map(len, sides.values()))
    return {side.name: [{"median_ms": ms, "p90_ms": 2 * ms,
                         "losses": losses.get(side.name, [3.5, 3.25])}
                        for ms in sides.get(side.name, [10] * rounds)]
            for side in sharded.SIDES}


def ratio(results, over, under):
    return next(one for one in results["workloads"][0]["ratios"]
                if (one["over"], one["under"]) == (over, under))


class Summary(unittest.TestCase):
    def test_ratios_are_taken_within_rounds(self):
        results = sharded.summarise(
            {4: figures_of(ddp=[10, 100, 20], fsdp=[10.4, 130, 20.8])}, LIMITED)
        one = ratio(results, "fsdp", "ddp")
        self.assertEqual((one["value"], one["min"], one["max"]),
                         (1.04, 1.04, 1.3))
        self.assertTrue(one["target_met"])

    def test_targets_have_a_direction(self):
        results = sharded.summarise(
            {4: figures_of(ddp=[10], fsdp=[10.6], fsdp_private=[12.9],
                           tensor=[10], checkpoint=[13.6], python_fsdp=[21.3],
                           python_tensor=[19.9])}, LIMITED)
        met = {one["over"]: one["target_met"]
               for one in results["workloads"][0]["ratios"]}
        self.assertEqual(met, {"python_fsdp": True, "fsdp": False,
                               "fsdp_private": True, "python_tensor": False,
                               "checkpoint": False})
        text = sharded.table(results)
        self.assertIn("| ours, FSDP, shared memory / ours, DDP "
                      "| 1.06 (1.06-1.06) MISSED | <= 1.05 |", text)
        self.assertIn("2.01 (2.01-2.01) met | >= 2 |", text)

    def test_other_losses_are_an_error(self):
        for wrong in (3.27, float("nan")):
            with self.assertRaises(processes.Failure) as caught:
                sharded.summarise({4: figures_of(
                    {"python_tensor": [3.5, wrong]}, ddp=[10])}, LIMITED)
            self.assertIn("did not train the same model", str(caught.exception))

    def test_ddp_must_not_fit_and_sharding_must(self):
        results = sharded.summarise({4: figures_of(ddp=[10])}, LIMITED)
        self.assertEqual([one["target_met"] for one in results["limited"]],
                         [True, True])
        text = sharded.table(results)
        self.assertIn(
            "| ours, DDP | rank 0: out of memory: 1 MiB | fails met |", text)
        changed = [{**one, "trains": not one["trains"], "line": "a line"}
                   for one in LIMITED]
        results = sharded.summarise({4: figures_of(ddp=[10])}, changed)
        self.assertEqual([one["target_met"] for one in results["limited"]],
                         [False, False])

    def test_the_limited_model_needs_more_than_the_limit(self):
        for model in (sharded.LIMITED, sharded.QUICK_LIMITED):
            self.assertGreater(model.needed_mib, model.limit_mib)


@unittest.skipUnless("LOCKSTEP_BUILD" in os.environ, "no build is named")
@unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class Programs(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.place = training.Place(
            processes.Programs(pathlib.Path(os.environ["LOCKSTEP_BUILD"])),
            pathlib.Path(scratch.name), None, True)

    def test_every_side_trains_the_same_model(self):
        with (mock.patch.object(sharded, "BATCH_SIZES", (4,)),
              mock.patch.object(sharded, "run_limited",
                                lambda *_: LIMITED[1])):
            results = sharded.measure(1, self.place, lambda _: None)
        # summarise() has compared the losses.
        for side in results["workloads"][0]["sides"]:
            self.assertGreater(side["median_ms"], 0)
            self.assertEqual(len(side["rounds"][0]["losses"]), 1)

    def test_a_rank_with_too_little_memory_says_so_in_one_line(self):
        ddp, fsdp = (sharded.run_limited(side, sharded.QUICK_LIMITED, self.place)
                     for side in sharded.SIDES[:2])
        self.assertTrue(fsdp["trains"])
        self.assertFalse(ddp["trains"])
        self.assertRegex(
            ddp["line"],
            r"^rank 0: out of memory: the system refused \d+ MiB .* the limit "
            r"of its own memory \(ulimit -d\) is 650 MiB; raise the limit, ")


if __name__ == "__main__":
    unittest.main()
