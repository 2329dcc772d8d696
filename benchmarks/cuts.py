"""Measures what a launcher makes of a network that is cut for some seconds and
heals: whether the workers of both nodes went on, and how long after the heal all
launchers had ended. Ours and torchrun run at once on the same two hosts
(hosts.py), so that they see the same cut. Each worker runs until it is told to
end, right after the heal."""

import pathlib
import subprocess
import tempfile
import time

from hosts import Hosts, Unable, command
from processes import Failure

SECONDS = (2, 6, 20)
NODES = 2
ALLOWED_S = 90
# Within this time after the heal our launchers must have ended.
TARGET_S = 5
PORTS = {"lockstep": 29400, "torchrun": 29500}


class Job:
    """One launcher's job: a node on each of the hosts."""

    def __init__(self, hosts, launcher, side, folder):
        self.end = folder / f"{side}-end"
        self.starts = folder / f"{side}-starts"
        self.starts.touch()
        worker = ["sh", "-c", f"echo >> {self.starts}; until [ -e {self.end} ]; "
                  "do sleep 0.05; done"]
        run = [launcher, "run"] if side == "lockstep" else [launcher]
        self.nodes = []
        for host in range(NODES):
            # torchrun looks for its address by its host's name, which a
            # namespace has not.
            options = (["--rdzv-insecure"] if side == "lockstep" else
                       ["--rdzv-backend=c10d",
                        f"--rdzv-conf=is_host={str(host == 0).lower()}",
                        f"--local-addr={hosts.address(host)}", "--no-python"])
            self.nodes.append(subprocess.Popen(
                [*hosts.on(host), *run, f"--nnodes={NODES}", "--max-restarts=3",
                 "--rdzv-id=cut",
                 f"--rdzv-endpoint={hosts.address(0)}:{PORTS[side]}",
                 *options, *worker],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL))

    def started(self):
        """Returns how many workers were started so far."""
        return len(self.starts.read_text())

    def await_start(self):
        deadline = time.monotonic() + ALLOWED_S
        while self.started() < NODES:
            if time.monotonic() > deadline:
                raise Failure("cut: the workers did not start")
            time.sleep(0.01)

    def tell_end(self):
        self.end.touch()
        self.told = time.monotonic()

    def result(self):
        """Returns whether each worker was started once and ended well, and the
        seconds from the heal to the end of the last launcher."""
        try:
            codes = [node.wait(timeout=ALLOWED_S) for node in self.nodes]
        except subprocess.TimeoutExpired:
            return {"went_on": False, "end_s": ALLOWED_S}
        return {"went_on": codes == [0] * NODES and self.started() == NODES,
                "end_s": time.monotonic() - self.told}

    def kill(self):
        for node in self.nodes:
            node.kill()
            node.wait()


def cut(launchers, seconds):
    """Returns the result of each side, by its name."""
    with Hosts() as hosts, tempfile.TemporaryDirectory() as name:
        jobs = {}
        try:
            for side, launcher in launchers.items():
                jobs[side] = Job(hosts, launcher, side, pathlib.Path(name))
            for job in jobs.values():
                job.await_start()
            time.sleep(1)  # nothing else is under way
            link = ["ip", "-n", hosts.names[0], "link", "set", hosts.ends[0]]
            command(*link, "down")
            time.sleep(seconds)
            command(*link, "up")
            for job in jobs.values():
                job.tell_end()
            return {side: job.result() for side, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.kill()


def measure(launchers, quick, progress):
    """Returns the results by seconds; none if such hosts cannot be made."""
    results = []
    try:
        for seconds in SECONDS[:1] if quick else SECONDS:
            progress(f"launch: cut of {seconds} s")
            results.append({"seconds": seconds, **cut(launchers, seconds)})
    except Unable as reason:
        progress("")
        print(f"cuts: skipped, such hosts cannot be made here: {reason}")
        return []
    return results


def words_of(result):
    return (f"went on, ended {result['end_s']:.1f} s after"
            if result["went_on"] else "ended or restarted")


def table(results):
    return ["| network between two nodes cut for | lockstep | torchrun |",
            "| --- | --- | --- |"] + [
                f"| {one['seconds']} s | {words_of(one['lockstep'])} | "
                f"{words_of(one['torchrun'])} |" for one in results]


def targets(results):
    rows = []
    for one in results:
        ours = one["lockstep"]
        rows.append((f"cut of {one['seconds']} s beside torchrun: workers that "
                     "go on, then end: s", TARGET_S, ours["end_s"],
                     ours["went_on"] and ours["end_s"] <= TARGET_S))
    return rows
