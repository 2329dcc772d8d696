"""The installed wheel: what torch finds, the command, and what is refused."""

import os
import pathlib
import re
import subprocess
import sys
import unittest
from importlib import metadata

import ranks

# One rank that reduces, after `before`.
PROGRAM = """
import torch, torch.distributed as dist
{before}
dist.init_process_group("{backend}")
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.eq(1).all()
assert dist.get_backend() == "{backend}", dist.get_backend()
print(dist.group.WORLD._get_backend_name(),
      dist.group.WORLD._get_backend(torch.device("cpu")).name())
dist.destroy_process_group()
"""
# A rank that has used Gloo ends like this, as in ranks.leave().
LEAVE = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def python(program, **more):
    return subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True,
        timeout=300, env=ranks.environment_of(0, 1, ranks.free_port(), **more))


class Wheel(unittest.TestCase):

    def test_is_found_by_torch(self):
        for backend in ("lockstep", "lockstep_shm"):
            done = python(PROGRAM.format(before="", backend=backend))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            # torch calls every backend that is not its own "custom".
            self.assertEqual(done.stdout, f"custom {backend}\n")

    def test_leaves_other_backends_alone(self):
        # torch 2.13 gave a group of "cpu:gloo" no name once a backend was
        # registered, and warned.
        for backend in ("gloo", "cpu:gloo"):
            done = python(PROGRAM.format(before="", backend=backend) + LEAVE)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(done.stdout, "gloo gloo\n")
        done = python("""
import torch, torch.distributed as dist
dist.init_process_group()
print(dist.get_backend_config())
dist.destroy_process_group()
""" + LEAVE)
        self.assertEqual((done.returncode, done.stdout), (0, "cpu:gloo\n"),
                         done.stderr)

    def test_loads_the_library_only_when_it_is_used(self):
        done = python("import sys, torch; print('lockstep._C' in sys.modules)")
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (0, "False\n", ""))

    def test_refuses_another_torch(self):
        done = python(PROGRAM.format(
            before="torch.__version__ = '2.12.0+cpu'", backend="lockstep"))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(
            done.stderr, r"RuntimeError: lockstep-torch \S+ was built for torch "
            r"\S+, and this is torch 2.12.0\+cpu; install the lockstep-torch "
            r"whose version ends in \+torch2.12.0\n$")

    def test_says_why_the_library_cannot_be_loaded(self):
        done = python(PROGRAM.format(
            before="import sys; sys.modules['lockstep._C'] = None",
            backend="lockstep"))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "RuntimeError: the library of "
                                      "lockstep-torch cannot be loaded: .*\n$")

    def test_never_breaks_the_import_of_torch(self):
        done = python("""
import sys
sys.modules["torch.distributed"] = None
import lockstep._torch
lockstep._torch.register()
""")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("lockstep is not a backend of torch.distributed here",
                      done.stderr)

    def test_refuses_options_that_it_does_not_have(self):
        done = python("""
import torch.distributed as dist
dist.init_process_group("lockstep", pg_options=object())
""")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "TypeError: pg_options is .*leave it out")

    def test_names_its_torch(self):
        version = metadata.version("lockstep-torch")
        torch = metadata.version("torch").partition("+")[0]
        self.assertTrue(version.endswith(f"+torch{torch}"), version)
        self.assertEqual(metadata.requires("lockstep-torch"),
                         [f"torch=={torch}"])

    def test_has_the_command(self):
        def command(*arguments):
            return subprocess.run([ranks.LOCKSTEP, *arguments], text=True,
                                  capture_output=True, timeout=300)

        version = metadata.version("lockstep-torch").partition("+")[0]
        self.assertEqual(command("--version").stdout, f"lockstep {version}\n")
        program = ("import torch, torch.distributed as dist\n"
                   "dist.init_process_group('lockstep')\n"
                   "tensor = torch.ones(1)\ndist.all_reduce(tensor)\n"
                   # One write, since both ranks write to one pipe.
                   "print(f'sum {tensor.item()}\\n', end='')\n"
                   "dist.destroy_process_group()\n")
        done = command("run", "--standalone", "--nproc-per-node=2", "--no-python",
                       sys.executable, "-c", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(re.findall("sum 2.0", done.stdout)), 2, done.stdout)
        # A program of the command that uses torch's library.
        done = command("bench", "all_reduce", "--sizes=4", "--iters=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("# all_reduce sum float32, 2 ranks", done.stdout)

    def test_is_found_by_cmake(self):
        prefix = pathlib.Path(subprocess.run(
            [ranks.LOCKSTEP, "--cmake-prefix"], text=True, check=True,
            capture_output=True).stdout.strip())
        self.assertTrue((prefix / "include/lockstep/lockstep.h").exists())
        torch = subprocess.run(
            [sys.executable, "-c",
             "import torch; print(torch.utils.cmake_prefix_path)"],
            text=True, check=True, capture_output=True).stdout.strip()
        source = pathlib.Path(__file__).parents[2] / "examples/own_project"
        done = subprocess.run(
            ["cmake", "-S", source, "-B", pathlib.Path(os.environ["TMPDIR"])
             / "own_project", "-G", "Ninja",
             f"-DCMAKE_PREFIX_PATH={prefix};{torch}"],
            text=True, capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
