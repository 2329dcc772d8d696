"""`./dev bench threads`: what it makes of figures."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import threads


def side(name, ranks, *p50):
    return {"name": name, "ranks": ranks, "threads": 2 // ranks,
            "rounds": [{"p50": one, "p90": one} for one in p50]}


class Summary(unittest.TestCase):
    def test_each_way_of_writing_is_compared_within_a_round(self):
        one = threads.summarise("mlp_adamw", threads.MODELS["mlp_adamw"], [
            side("unfused", 1, 30, 300, 33), side("fused", 1, 10, 100, 11),
            side("one thread", 1, 20, 200, 22),
            side("unfused", 2, 60, 600, 66), side("fused", 2, 20, 200, 22),
            side("sharded", 2, 10, 125, 11)])
        self.assertEqual(one["plain"], 0.5)
        self.assertFalse(one["plain_target_met"])
        self.assertEqual(one["readme"], 1.5)
        self.assertEqual((one["ratio_min"], one["ratio"]), (0.8, 1.0))
        text = threads.table([one])
        self.assertIn("| mlp_adamw | 0.50 | 0.50-0.50 | >= 1.00 MISSED | 1.50 |",
                      text)


if __name__ == "__main__":
    unittest.main()
