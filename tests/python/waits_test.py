"""What a Python rank does while it waits, and how it ends.

The ranks shake hands over their standard streams, so that no test sleeps to
order two ranks.
"""

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import ranks

SECONDS = 180


def part_threads_run_meanwhile():
    """Other threads run while a thread waits in a collective."""
    counted = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.001)

    dist.barrier()
    if rank == 0:
        thread = threading.Thread(target=count)
        thread.start()
        # Rank 1 comes only when the thread has counted while this one waits.
        before = counted[0]
        threading.Thread(target=release_when,
                         args=(lambda: counted[0] > before + 20,)).start()
        dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        stop.set()
        thread.join()
    else:
        assert sys.stdin.readline() == "go\n"
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


def release_when(condition):
    while not condition():
        time.sleep(0.001)
    print("ready", flush=True)


def part_interrupted():
    """Rank 0 waits in the call that argv names; Ctrl-C ends it."""
    kind = sys.argv[3]
    if rank == 1:
        # Comes too late. What rank 0 gave to its first call stays; the second
        # call must fail.
        sys.stdin.readline()
        try:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            print(f"peer: {error}", flush=True)
        os._exit(0)
    print("waits", flush=True)
    try:
        if kind == "all_reduce":
            dist.all_reduce(torch.ones(1))
        elif kind == "wait":
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        elif kind == "queue":
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.all_reduce(torch.ones(1))
        elif kind == "recv":
            dist.recv(torch.ones(1), 1)
        elif kind == "new_group":
            dist.new_group([0, 1])
        elif kind == "monitored_barrier":
            dist.monitored_barrier()
        elif kind == "destroy_process_group":
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.destroy_process_group()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


def part_data_loader():
    """Workers of a DataLoader are forked from a rank, and end before it."""
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor(index * index)

    dist.all_reduce(torch.ones(1))
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=2,
            multiprocessing_context="fork")
        total = torch.zeros((), dtype=torch.int64)
        for batch in loader:
            total += batch.sum()
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(total)
        assert total == size * sum(i * i for i in range(8)), total
    child = os.fork()
    if child == 0:
        # A forked process has no part in the group, and must say so.
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def part_killed():
    """Rank 1 is killed; the error of the others names it."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        print("waits", flush=True)
        signal.pause()
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        print(f"error: {error}", flush=True)
        os._exit(0)


def part_raises():
    """Rank 0 ends by an exception while its operation is pending."""
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("a mistake of the program")
    sys.stdin.readline()
    try:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        print(f"error: {error}", flush=True)


def part_exits():
    """Rank 0 ends by sys.exit() while its operation is pending."""
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        sys.exit(3)
    sys.stdin.readline()
    try:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        print(f"error: {error}", flush=True)


def part_no_time():
    """Rank 0 gives rank 1 no time to come to a barrier."""
    if rank == 1:
        sys.stdin.readline()
        os._exit(0)
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(0))
    except dist.DistBackendError as error:
        print(f"error: {error}", flush=True)
    os._exit(0)


def part_ends():
    """Ranks that forget destroy_process_group() end well at any time."""
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        sys.stdin.readline()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 0:
        work.wait()


def rank_main(part):
    global torch, dist, rank, size
    import torch
    import torch.distributed as dist

    dist.init_process_group(sys.argv[2])
    rank, size = dist.get_rank(), dist.get_world_size()
    globals()[f"part_{part}"]()


class Waits(unittest.TestCase):

    def start(self, size, part, *more):
        port = ranks.free_port()
        return [subprocess.Popen(
            [sys.executable, __file__, part, "lockstep", *more], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
            env=ranks.environment_of(rank, size, port))
            for rank in range(size)]

    def expect_line(self, process, line):
        have = process.stdout.readline()
        if have != line + "\n":
            process.kill()
            self.fail(f"{have}{process.stderr.read()}")

    def await_sleep(self, process):
        """Returns when the main thread sleeps, as it does while it waits."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with open(f"/proc/{process.pid}/task/{process.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "S":
                    return
            time.sleep(0.001)
        self.fail("the process does not sleep")

    def tell(self, process):
        process.stdin.write("go\n")
        process.stdin.flush()

    def test_let_other_threads_run(self):
        processes = self.start(2, "threads_run_meanwhile")
        self.expect_line(processes[0], "ready")
        self.tell(processes[1])
        for code, output, errors in ranks.finish(processes):
            self.assertEqual(code, 0, output + errors)

    def test_end_with_control_c(self):
        for kind in ("all_reduce", "wait", "queue", "recv", "new_group",
                     "monitored_barrier", "destroy_process_group"):
            with self.subTest(kind=kind):
                processes = self.start(2, "interrupted", kind)
                self.expect_line(processes[0], "waits")
                self.await_sleep(processes[0])
                processes[0].send_signal(signal.SIGINT)
                output, errors = processes[0].communicate(timeout=SECONDS)
                self.assertEqual(output, "interrupted\n", errors)
                self.assertIn("KeyboardInterrupt", errors)
                self.assertNotEqual(processes[0].returncode, 0)
                self.tell(processes[1])
                output, errors = processes[1].communicate(timeout=SECONDS)
                self.assertEqual(processes[1].returncode, 0, output + errors)
                self.assertRegex(output, "peer: .*rank 0")

    def test_allow_forked_workers(self):
        for code, output, errors in ranks.finish(self.start(2, "data_loader")):
            self.assertEqual(code, 0, output + errors)

    def test_name_the_rank_that_was_killed(self):
        processes = self.start(3, "killed")
        self.expect_line(processes[1], "waits")
        processes[1].kill()
        ended = ranks.finish(processes)
        for rank in (0, 2):
            code, output, errors = ended[rank]
            self.assertEqual(code, 0, errors)
            self.assertRegex(output, rf"all_reduce #2 in group 'default_pg' on "
                                     rf"rank {rank} of 3 failed .*rank 1 died")
            self.assertIn("flight record", output)

    def test_end_by_an_exception_that_peers_hear_of(self):
        processes = self.start(2, "raises")
        output, errors = processes[0].communicate(timeout=SECONDS)
        self.assertEqual(processes[0].returncode, 1)
        self.assertIn("ValueError: a mistake of the program", errors)
        self.tell(processes[1])
        output, errors = processes[1].communicate(timeout=SECONDS)
        self.assertEqual(processes[1].returncode, 0, output + errors)
        self.assertRegex(output, "error: .*rank 0")

    def test_end_by_an_exit_that_no_peer_can_delay(self):
        processes = self.start(2, "exits")
        output, errors = processes[0].communicate(timeout=SECONDS)
        self.assertEqual((processes[0].returncode, errors), (3, ""), output)
        self.tell(processes[1])
        output, errors = processes[1].communicate(timeout=SECONDS)
        self.assertEqual(processes[1].returncode, 0, output + errors)
        self.assertRegex(output, "error: .*rank 0")

    def test_end_at_once_if_they_have_no_time(self):
        processes = self.start(2, "no_time")
        output, errors = processes[0].communicate(timeout=SECONDS)
        self.assertEqual(processes[0].returncode, 0, errors)
        self.assertRegex(output, r"error: monitored_barrier .*rank 1")
        self.tell(processes[1])
        for code, output, errors in ranks.finish(processes[1:]):
            self.assertEqual(code, 0, output + errors)

    def test_end_without_destroying_the_group(self):
        processes = self.start(2, "ends")
        self.tell(processes[0])
        for code, output, errors in ranks.finish(processes):
            self.assertEqual((code, errors), (0, ""), output)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
    else:
        unittest.main()
