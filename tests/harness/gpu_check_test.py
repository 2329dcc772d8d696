"""What `./dev gpu-check` says if the machine lacks something, and what it makes
of the report of a program of tests."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import gpu_check


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.devices = self.folder / "dev"
        self.torch = self.folder / "torch"
        (self.torch / "lib").mkdir(parents=True)
        (self.torch / "share" / "cmake").mkdir(parents=True)
        self.devices.mkdir()

    def look(self, torch=None):
        """Returns the exit code of `missing`, and what it prints."""
        out = io.StringIO()
        arguments = ["gpu_check.py", "missing", str(torch or self.torch),
                     "--devices", str(self.devices)]
        with (mock.patch.object(sys, "argv", arguments),
              contextlib.redirect_stdout(out),
              self.assertRaises(SystemExit) as ended):
            gpu_check.main()
        return ended.exception.code, out.getvalue()

    def add_gpu(self):
        (self.devices / "nvidia0").touch()

    def add_cuda(self):
        (self.torch / "lib" / "libtorch_cuda.so").touch()

    def test_everything_that_is_missing_is_one_line(self):
        (self.devices / "nvidiactl").touch()  # a driver without a GPU
        code, out = self.look()
        self.assertEqual(code, 1)
        self.assertEqual(out.count("\n"), 1)
        self.assertIn("a GPU of NVIDIA", out)
        self.assertIn(f"a LibTorch with CUDA ({self.torch} has no", out)

    def test_only_what_is_missing_is_named(self):
        self.add_gpu()
        code, out = self.look()
        self.assertEqual(code, 1)
        self.assertNotIn("a GPU of NVIDIA", out)
        self.assertIn("LOCKSTEP_TORCH_DIR", out)

    def test_nothing_is_missing(self):
        self.add_gpu()
        self.add_cuda()
        self.assertEqual(self.look(), (0, ""))
        self.assertEqual(self.look(self.torch / "share" / "cmake"), (0, ""))


class ReportOfTests(unittest.TestCase):
    CASE = '<testcase name="{}" classname="C" status="run" result="{}">{}</testcase>'

    def check(self, cases, code):
        with tempfile.TemporaryDirectory() as folder:
            build = pathlib.Path(folder)
            (build / "test-results").mkdir()

            def ctest(*_, **__):
                (build / "test-results" / "x.xml").write_text(
                    f"<testsuites>{cases}</testsuites>")
                return mock.Mock(returncode=code)

            with mock.patch.object(gpu_check.subprocess, "run", ctest):
                return gpu_check.check_tests(build, "x", build / "x.log")

    def test_cases_are_counted_and_reasons_of_skips_given(self):
        passed = self.CASE.format("A", "completed", "")
        skipped = self.CASE.format(
            "B", "skipped", '<skipped message="f:1&#x0A;needs 2 GPUs"/>')
        failed = self.CASE.format("D", "completed", '<failure message=""/>')
        self.assertEqual(
            self.check(passed + skipped, 0),
            ("passed", "1 case passed, 1 skipped: needs 2 GPUs"))
        self.assertEqual(self.check(skipped, 0)[0], "skipped")
        self.assertEqual(self.check(passed + failed, 8),
                         ("failed", "1 case passed, 1 failed"))
        # All cases have passed, but the program ended badly.
        self.assertEqual(self.check(passed, 8)[0], "failed")


if __name__ == "__main__":
    unittest.main()
