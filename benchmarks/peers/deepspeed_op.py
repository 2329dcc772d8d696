"""Compiles DeepSpeed's all_reduce over shared memory, for `./dev bench python`.

    python deepspeed_op.py FOLDER

Gets the source of DeepSpeed from PyPI and compiles the extension that DeepSpeed
itself compiles when it is first used (op_builder/cpu/comm.py there). The last
line of the output is the path of the library. What FOLDER has is not made again.
"""

import pathlib
import subprocess
import sys
import tarfile

VERSION = "0.19.8"
NAME = "deepspeed_shm"


def source(folder):
    archive = folder / f"deepspeed-{VERSION}.tar.gz"
    if not archive.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet",
                        "--no-deps", "--no-build-isolation",
                        "--no-binary=:all:", f"--dest={folder}",
                        f"deepspeed=={VERSION}"], check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"deepspeed-{VERSION}" / "csrc" / "cpu"


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}.so"
    if not library.exists():
        from torch.utils import cpp_extension
        csrc = source(folder)
        cpp_extension.load(
            NAME, [str(csrc / "comm" / name)
                   for name in ("shm_interface.cpp", "shm.cpp")],
            extra_include_paths=[str(csrc / "includes")],
            extra_cflags=["-O2", "-fopenmp"], extra_ldflags=["-fopenmp"],
            build_directory=str(folder))
    print(library)


if __name__ == "__main__":
    main()
