"""Makes a virtual environment in which only the wheel and torch are.

Usage: install_wheel.py BUILD SOURCE FOLDER

Builds the wheel of lockstep-torch in SOURCE from the build folder BUILD, and
installs it into a new environment, FOLDER, beside links to what the Python that
runs this has installed.
"""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

if importlib.util.find_spec("scikit_build_core") is None:
    print("skipped: scikit-build-core, which builds the wheel, is not installed")
    sys.exit(77)
build, source, folder = map(pathlib.Path, sys.argv[1:])
wheels = folder.parent / "wheel"
for old in (wheels, folder):
    shutil.rmtree(old, ignore_errors=True)
subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
                "--no-build-isolation", "--no-index", f"--wheel-dir={wheels}",
                f"-Ccmake.define.LOCKSTEP_BUILD={build}", source / "python"],
               check=True)
venv.create(folder, with_pip=False, symlinks=True)
python = folder / "bin" / "python"
site = pathlib.Path(subprocess.check_output(
    [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
    text=True).strip())
for installed in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
    if not installed.name.startswith(("lockstep", "__pycache__")):
        (site / installed.name).symlink_to(installed)
wheel, = wheels.glob("*.whl")
subprocess.run([sys.executable, "-m", "pip", f"--python={python}", "install",
                "--quiet", "--no-deps", "--no-index", wheel], check=True)
