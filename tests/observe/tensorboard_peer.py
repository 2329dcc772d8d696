"""The Python side of tensorboard_interop_test.cpp.

    tensorboard_peer.py FOLDER

FOLDER/ours has what the test wrote with Lockstep. This writes the same to
FOLDER/python with torch.utils.tensorboard, and compares the two event by event;
FOLDER/alone has what only Lockstep can write. TensorBoard's own loader reads
all files, and refuses wrong checksums. Exits with 77 if a package is missing.
"""

import csv
import io
import json
import math
import pathlib
import sys
import unittest

try:
    import numpy as np
    import torch
    from PIL import Image
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.backend.event_processing.event_accumulator import (
        STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator)
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    print(error)
    sys.exit(77)

FOLDER = pathlib.Path(sys.argv[1])
OURS, PYTHON, ALONE = (FOLDER / name for name in ("ours", "python", "alone"))


def write_everything():
    with SummaryWriter(PYTHON) as writer:
        writer.add_scalar("train/loss", 0.1, 1, 1000.5)
        writer.add_scalar("train/loss", -2.0, 2, 1001.5)
        writer.add_scalar("train/loss", 0.0, 1 << 40, 1002.5)
        writer.add_scalar("train/loss", math.nan, -3, 1003.5)
        writer.add_scalar("train/loss", -math.inf, None, 1004.5)
        writer.add_scalar("Verlust \u00fc/\u65e5\u672c", torch.tensor([[7]]), 5,
                          1005.5)
        writer.add_scalar("half", torch.tensor(0.1, dtype=torch.float16), 5,
                          1005.5)
        writer.add_scalars("curves/main", {"a": 1.5, "b/c": -2.0}, 4, 1006.5)
        writer.add_scalars("curves/main", {"a": 2.5}, 5, 1007.5)

        numbers = (torch.arange(5000) * 37 % 1001 - 500) / 7
        edges = torch.tensor(writer.default_bins, dtype=torch.float64)
        special = torch.tensor([0, -0.0, 1e-12, -1e-12, 5e-13, 1e25, -3],
                               dtype=torch.float64)
        broken = torch.tensor([math.nan, 1, math.inf, 2, -math.inf])
        between = torch.tensor([-1.5, -1, -0.5, 0, 0.25, 0.5, 2, 2.5])
        for tag, values in {
                "floats": numbers, "matrix": numbers.reshape(50, 100).t(),
                "halves": numbers.half(), "integers": torch.arange(100),
                "bools": torch.tensor([True, False, True]),
                "one": torch.tensor(3.0), "edges": edges, "special": special,
                "broken": broken}.items():
            writer.add_histogram("histograms/" + tag, values, 6, walltime=1008.5)
        for tag, bins in {
                "gaps": [-1, 0, 0.5, 2], "two": [0, 1], "right": [1, 2, 2.25],
                "narrow": [2 + k / 1024 for k in range(-3, 300)]}.items():
            writer.add_histogram("bins/" + tag, between, 6, bins, 1009.5)

        writer.add_text("note", "**bold** \u00fc\nline", 7, 1010.5)
        writer.add_text("note", "", 8, 1011.5)

        colours = (torch.arange(3 * 4 * 5) / 50 - 0.1).reshape(3, 4, 5)
        colours[0, 0, 0] = 0.999
        bytes_ = torch.arange(4 * 5 * 3, dtype=torch.uint8).reshape(4, 5, 3) * 4
        writer.add_image("chw", colours, 9, 1012.5)
        writer.add_image("gray", colours[:1], 9, 1012.5)
        writer.add_image("hwc", bytes_, 9, 1012.5, "HWC")
        writer.add_image("hw", colours[1].double(), 9, 1012.5, "HW")
        writer.add_image("rgba", torch.cat([colours, colours[:1]]), 9, 1012.5)

        many = (torch.arange(10 * 3 * 2 * 4) / 240).reshape(10, 3, 2, 4)
        writer.add_images("many", many, 9, 1012.5)
        writer.add_images("few", many[:3, :1], 9, 1012.5)

        writer.add_hparams({"lr": 0.1, "batch": 32, "optimizer": "adam"},
                           {"hparam/accuracy": 0.9, "hparam/loss": 0.0},
                           run_name="tried", global_step=10)
    with SummaryWriter(PYTHON / "resumed", purge_step=5) as writer:
        writer.add_scalar("a", 1.0, 5, 1013.5)


def folders(root):
    return sorted(str(path.parent.relative_to(root))
                  for path in root.rglob("events.out.tfevents.*"))


def events(folder):
    [path] = folder.glob("events.out.tfevents.*")
    return list(event_file_loader.LegacyEventFileLoader(str(path)).Load())


def accumulator(folder):
    return EventAccumulator(str(folder), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def without_time(event):
    result = type(event)()
    result.CopyFrom(event)
    result.ClearField("wall_time")
    return result


def pixels(image):
    return np.array(Image.open(io.BytesIO(image.encoded_image_string)))


class TensorBoard(unittest.TestCase):

    def test_same_folders(self):
        self.assertEqual(folders(OURS), folders(PYTHON))
        self.assertEqual(folders(OURS),
                         [".", "curves_main_a", "curves_main_b/c", "resumed",
                          "tried"])

    def test_names_of_files(self):
        [ours] = OURS.glob("events*")
        [python] = PYTHON.glob("events*")
        ours, python = ours.name.split("."), python.name.split(".")
        self.assertEqual(ours[:3], python[:3])
        self.assertLess(abs(int(ours[3]) - int(python[3])), 600)
        self.assertEqual(ours[4:-2], python[4:-2])

    def test_each_event(self):
        for folder in folders(OURS):
            ours, python = events(OURS / folder), events(PYTHON / folder)
            # Python writes the version of the file again before a restart.
            python = python[:1] + [event for event in python[1:]
                                   if not event.file_version]
            self.assertEqual(len(ours), len(python), folder)
            for mine, its in zip(ours, python):
                with self.subTest(folder=folder, event=str(its)[:200]):
                    self.compare(mine, its)

    def compare(self, mine, its):
        if not 1000 <= its.wall_time < 2000:  # the time of writing
            self.assertLess(abs(mine.wall_time - its.wall_time), 600)
        else:
            self.assertEqual(mine.wall_time, its.wall_time)
        mine, its = without_time(mine), without_time(its)
        if its.file_version:
            self.assertEqual(mine.source_metadata.writer,
                             "lockstep::SummaryWriter")
            mine.source_metadata.CopyFrom(its.source_metadata)
        value = its.summary.value[0] if its.summary.value else None
        if value is not None and value.HasField("histo"):
            self.compare_histograms(mine.summary.value[0].histo, value.histo)
            mine.summary.value[0].histo.CopyFrom(value.histo)
        if value is not None and value.HasField("image"):
            image = mine.summary.value[0].image
            np.testing.assert_array_equal(pixels(image), pixels(value.image))
            image.encoded_image_string = value.image.encoded_image_string
        if value is not None and value.metadata.plugin_data.content:
            self.compare_hparams(mine.summary.value[0].metadata.plugin_data,
                                 value.metadata.plugin_data)
        # As bytes, so that NaN is equal to itself.
        self.assertEqual(mine.SerializeToString(deterministic=True),
                         its.SerializeToString(deterministic=True))

    def compare_histograms(self, mine, its):
        self.assertEqual(list(mine.bucket_limit), list(its.bucket_limit))
        self.assertEqual(list(mine.bucket), list(its.bucket))
        self.assertEqual(mine.num, its.num)
        np.testing.assert_equal([mine.min, mine.max], [its.min, its.max])
        # Added in another order; the terms of the sum may cancel each other.
        np.testing.assert_allclose(mine.sum_squares, its.sum_squares, 1e-12)
        np.testing.assert_allclose(
            mine.sum, its.sum, 1e-12,
            atol=1e-12 * math.sqrt(its.num * its.sum_squares))

    def compare_hparams(self, mine, its):
        # A map, whose order means nothing.
        parse = plugin_data_pb2.HParamsPluginData.FromString
        self.assertEqual(parse(mine.content), parse(its.content))
        mine.content = its.content

    def test_tensorboard_shows_the_same(self):
        for folder in folders(OURS):
            ours, python = accumulator(OURS / folder), accumulator(PYTHON / folder)
            self.assertEqual(ours.Tags(), python.Tags())
            for tag in ours.Tags()["scalars"]:
                np.testing.assert_equal(
                    [event.value for event in ours.Scalars(tag)],
                    [event.value for event in python.Scalars(tag)])
        ours = accumulator(OURS)
        self.assertEqual(len(ours.Tags()["histograms"]), 13)
        self.assertEqual(len(ours.Tags()["images"]), 7)
        self.assertEqual(ours.Tags()["tensors"], ["note/text_summary"])
        self.assertEqual([event.step for event in ours.Scalars("train/loss")],
                         [1, 2, 1 << 40, -3, 0])
        note = ours.Tensors("note/text_summary")[0].tensor_proto
        self.assertEqual(note.string_val[0].decode(), "**bold** \u00fc\nline")

    def test_restart_hides_later_steps(self):
        shown = accumulator(ALONE / "restarted").Scalars("a")
        self.assertEqual([event.step for event in shown], [1, 2, 3, 4])
        self.assertEqual([event.value for event in shown], [1, 2, 30, 40])

    def test_a_bool_is_a_bool(self):
        # Python's writer makes a number of it, because its bools are ints.
        summaries = accumulator(ALONE / "tried").PluginTagToContent("hparams")
        data = plugin_data_pb2.HParamsPluginData.FromString
        start = data(summaries["_hparams_/session_start_info"])
        self.assertIs(start.session_start_info.hparams["amp"].bool_value, True)
        [info] = data(summaries["_hparams_/experiment"]).experiment.hparam_infos
        self.assertEqual((info.name, info.type), ("amp", api_pb2.DATA_TYPE_BOOL))

    def test_no_value_in_any_bin(self):
        [event] = accumulator(ALONE).Histograms("nothing")
        self.assertEqual(list(event.histogram_value.bucket), [0, 0])
        self.assertEqual(event.histogram_value.num, 2)

    def test_after_sigkill_tensorboard_reads_what_was_flushed(self):
        shown = accumulator(ALONE / "killed").Scalars("a")
        self.assertEqual([event.value for event in shown], [0, 1, 2])

    def test_tables(self):
        with open(ALONE / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(rows[0], {"step": "1", "loss": "0.1", "a, b": ""})
        self.assertTrue(math.isnan(float(rows[1]["loss"])))
        self.assertEqual(float(rows[1]["a, b"]), -math.inf)
        lines = (ALONE / "metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line) for line in lines],
                         [{"step": 1, "loss": 0.1},
                          {"step": 2, "loss": None, "\u00fc \"": 1e-300}])


write_everything()
unittest.main(argv=sys.argv[:1])
