"""`./dev bench hosts`: two hosts, the hierarchy against Gloo between all ranks.

The hosts are network namespaces joined by a cable of limited speed, so this
needs the right to make them (root), and `ip` and `tc`. Ranks alternate between
both sides (hosts.cpp).
"""

import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import time

LINK = "1gbit"
BYTES = 16 << 20
# Ranks a host -> how many times faster the hierarchy must be. The bytes on the
# link allow 2 - 1/R for R ranks a host: 1.5 and 1.75.
TARGETS = {2: 1.4, 4: 1.6}
TIMEOUT_S = 240


class Unable(Exception):
    """Raised, with the reason, if such hosts cannot be made here."""


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unable(f"{' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Two network namespaces; removed after `with`."""

    def __init__(self):
        identity = os.getpid()
        self.names = [f"lockstep-bench-{side}-{identity}" for side in "ab"]
        self.ends = [f"lsb{side}{identity}" for side in "ab"]

    @staticmethod
    def address(host):
        return f"198.18.0.{host + 1}"

    def __enter__(self):
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise Unable(f"there is no `{tool}` (Debian: iproute2)")
        try:
            self.make()
        except Unable:
            self.__exit__()
            raise
        return self

    def make(self):
        for name in self.names:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", self.ends[0], "netns", self.names[0],
                "type", "veth", "peer", "name", self.ends[1], "netns",
                self.names[1])
        for host, (name, end) in enumerate(zip(self.names, self.ends)):
            command("ip", "-n", name, "addr", "add",
                    self.address(host) + "/24", "dev", end)
            command("ip", "-n", name, "link", "set", end, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("tc", "-n", name, "qdisc", "add", "dev", end, "root",
                    "tbf", "rate", LINK, "burst", "128kb", "latency", "50ms")

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def on(self, host):
        return ["ip", "netns", "exec", self.names[host]]


def run_ranks(program, hosts, ranks_a_host, rounds, calls):
    """Runs the ranks. Returns the figures that rank 0 printed."""
    size = 2 * ranks_a_host
    ranks = []
    try:
        for rank in range(size):
            environment = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank % ranks_a_host),
                WORLD_SIZE=str(size), MASTER_ADDR=hosts.address(0),
                MASTER_PORT="29500", OMP_NUM_THREADS="1")
            ranks.append(subprocess.Popen(
                [*hosts.on(rank // ranks_a_host), program, "--bytes",
                 str(BYTES), "--rounds", str(rounds), "--calls", str(calls)],
                env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        until = time.monotonic() + TIMEOUT_S
        said = [rank.communicate(timeout=max(1, until - time.monotonic()))
                for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
    for rank, (_, err) in zip(ranks, said):
        if rank.returncode != 0:
            raise RuntimeError(err)
    return json.loads(said[0][0].splitlines()[-1])


def measure(build, rounds, quick, progress):
    """Returns the results, one for each number of ranks a host."""
    program = str(pathlib.Path(build).resolve() / "bin/benchmarks/hosts")
    results = []
    with Hosts() as hosts:
        for ranks_a_host, target in TARGETS.items():
            progress(f"hosts: {ranks_a_host} ranks a host")
            figures = run_ranks(program, hosts, ranks_a_host, rounds,
                                2 if quick else 5)
            ours, gloo = figures["lockstep"], figures["gloo"]
            by_round = [b / a for a, b in zip(ours, gloo)]
            results.append({
                "ranks_a_host": ranks_a_host, "bytes": BYTES, "link": LINK,
                "lockstep_us": ours, "gloo_us": gloo,
                "ratio": round(statistics.median(by_round), 3),
                "ratio_min": round(min(by_round), 3),
                "ratio_max": round(max(by_round), 3), "target": target})
    progress("")
    return results


def table(results):
    lines = ["| ranks a host | lockstep | Gloo | ratio | of the rounds | target |",
             "|---|---:|---:|---:|---:|---:|"]
    for one in results:
        ours, gloo = (statistics.median(one[side]) / 1000
                      for side in ("lockstep_us", "gloo_us"))
        lines.append(
            f"| {one['ranks_a_host']} | {ours:.1f} ms | {gloo:.1f} ms | "
            f"{one['ratio']:.2f}x | {one['ratio_min']:.2f}-"
            f"{one['ratio_max']:.2f} | {one['target']}x |")
    return "\n".join(lines)
