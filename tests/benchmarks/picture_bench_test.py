"""The picture of the training steps: README's, and that of `./dev bench ddp`."""

import argparse
import contextlib
import io
import json
import pathlib
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from unittest import mock

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "benchmarks"))

import bench
import picture
import training

ROW = re.compile(r"\| (.+?) \|.*?([\d.]+)× \(([\d.]+)–([\d.]+)\)")


def table_rows():
    """Returns each step's label, ratio, lowest and highest ratio in the
    table of docs/compared.md."""
    lines = (SOURCE / "docs/compared.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines)
                 if line.startswith("| a step of |")) + 2
    return [ROW.match(line).groups()
            for line in lines[first:lines.index("", first)]]


def result(name, ratio, least, most):
    return {"name": name, "ratio": ratio, "ratio_min": least,
            "ratio_max": most}


class SummaryPicture(unittest.TestCase):
    def test_readme_shows_the_figures_of_the_table(self):
        rows = table_rows()
        self.assertEqual([label for label, *_ in rows],
                         list(picture.LABELS.values()))
        drawn = picture.draw([result(name, *map(float, figures)) for
                              name, (_, *figures) in zip(picture.LABELS, rows)])
        self.assertEqual(
            drawn, (SOURCE / "docs/pictures/steps.svg").read_text(),
            "docs/pictures/steps.svg is not the picture of the table in docs/compared.md")

    def test_every_step_of_the_benchmark_is_drawn(self):
        self.assertEqual(list(picture.LABELS), list(training.STEPS))

    def test_lengths_are_those_of_the_figures(self):
        drawn = picture.draw([result("job", 9, 9, 9),
                              result("mlp", 2.04, 1.96, 4.0)])
        root = xml.etree.ElementTree.fromstring(drawn)
        ours, python = (float(bar.get("width"))
                        for bar in root.findall(".//{*}g/{*}rect"))
        self.assertEqual(4 * ours, picture.BARS_TO - picture.BARS_FROM)
        self.assertEqual(python, 2 * ours)
        words = [text.text for text in root.findall(".//{*}g/{*}text")]
        self.assertEqual(words, [picture.LABELS["mlp"], "2.0×", "2.0–4.0"])


    def test_the_benchmark_draws_what_it_writes(self):
        times = {"lockstep": 10, "copied": 11, "python": 40,
                 "without_communication": 10}
        figures = {"narrow": {side: [{"median": time, "trace": {"waited_us": 1}}]
                              for side, time in times.items()}}
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            path = pathlib.Path(folder) / "narrow.json"
            args = argparse.Namespace(build=pathlib.Path(folder), json=path,
                                      rounds=1, quick=True)
            said = io.StringIO()
            with (mock.patch.object(training, "measure", return_value=figures),
                  mock.patch.object(bench, "machine", return_value={
                      "cores": 2, "cpu": "", "torch": "", "load_before": 0}),
                  contextlib.redirect_stdout(said)):
                bench.bench_training(args, ["narrow"])
            self.assertIn("drawn in narrow.svg", said.getvalue())
            results = json.loads(path.read_text())["benchmarks"]
            self.assertEqual(path.with_suffix(".svg").read_text(),
                             picture.draw(results))
            self.assertEqual(results[0]["ratio"], 4)


if __name__ == "__main__":
    unittest.main()
