"""`./dev demo` says if other programs use the cores: its speed-ups were far too
low then, and nothing said why."""

import pathlib
import re
import subprocess
import sys


def said(dev, load, cores):
    function = re.search(r"^busy_text\(\) \{.*?^\}", dev, re.M | re.S)[0]
    return subprocess.run(
        ["bash", "-euc", function + '\nbusy_text "$@"', "demo", load, cores],
        check=True, capture_output=True, text=True).stdout


dev = (pathlib.Path(sys.argv[1]) / "dev").read_text()
for load, cores in (("0.00", "2"), ("0.39", "2"), ("12.7", "64")):
    assert said(dev, load, cores) == "", (load, cores)
for load, cores in (("0.40", "2"), ("3.51", "2"), ("12.8", "64")):
    assert f"a load of {load} on {cores} cores" in said(dev, load, cores)
demo = re.search(r"^demo\(\) \{.*?^\}", dev, re.M | re.S)[0]
assert demo.index("/proc/loadavg") < demo.index("build dev"), \
    "the load is read before the demo makes some itself"
assert "the first run takes" in demo
