"""The wheel's version and dependency, for scikit-build-core.

A wheel fits the torch that it was built beside, so its version names it.
"""

import re
from importlib import metadata
from pathlib import Path


def dynamic_metadata(field, settings, project=None):
    torch = metadata.version("torch").partition("+")[0]
    if field == "dependencies":
        return [f"torch=={torch}"]
    lists = Path(__file__).parent.parent / "CMakeLists.txt"
    version = re.search(r"project\(Lockstep VERSION (\S+)", lists.read_text())
    return f"{version[1]}+torch{torch}"
