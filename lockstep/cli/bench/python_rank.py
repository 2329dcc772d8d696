"""One rank of Python's torch.distributed under `lockstep bench --peers`.

    python python_rank.py TIMEOUT_MS BACKEND

with the environment of a worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
It says on stdout that it is ready, then answers each line of JSON on stdin
with a line, until stdin ends: docs/benchmarks.md, "Your own peer", has these
lines, but each rank answers for itself. For each operation it does what
rank/operation_case.cpp does. BACKEND is gloo, or lockstep, which lockstep-torch
brings.
"""

import datetime
import json
import os
import platform
import signal
import sys
import time

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
CHUNK = 1 << 20  # elements that are compared at a time
REDUCED = -1     # as the source of a segment: all ranks, reduced


def say(line):
    print(json.dumps({"rank": RANK, **line}), flush=True)


try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    say({"id": 0, "usage": True, "error":
         f"{sys.executable} cannot import torch ({error}); with --python or "
         "LOCKSTEP_PYTHON name a Python that can"})
    sys.exit(0)


COMBINE = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul,
    "min": torch.minimum, "max": torch.maximum, "band": torch.bitwise_and,
    "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}


# Takes the newer names if torch has them: the older ones warn at each call.
all_gather_single = getattr(
    dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(
    dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OperationCase:
    """One operation with its tensors; roots are rank 0."""

    def __init__(self, request):
        self.reduce_op = request["reduce_op"]
        self.is_async = request["async"]
        self.input = self.output = None
        # (begin, length, source, source_begin) of the result
        self.expected = []
        self.share = 1
        self.all = request["elements"]
        self.part = self.all // SIZE
        self.dtype = getattr(torch, request["dtype"])
        getattr(self, "set_up_" + request["operation"])()

    def make(self, elements):
        return torch.empty(elements, dtype=self.dtype)

    def finish(self, work):
        if work is not None:
            work.wait()

    def op(self):
        # Gloo has no mean: divide() divides, then this sums.
        return getattr(dist.ReduceOp, {"avg": "SUM"}.get(
            self.reduce_op, self.reduce_op.upper()))

    def divide(self, tensor):
        if self.reduce_op == "avg":
            tensor.div_(SIZE)

    def expect_parts(self, source_part):
        self.expected = [(source * self.part, self.part, source,
                          source_part * self.part) for source in range(SIZE)]

    def set_up_barrier(self):
        self.run = lambda: self.finish(dist.barrier(async_op=self.is_async))

    def set_up_all_reduce(self):
        self.output = self.input = self.make(self.all)
        self.expected = [(0, self.all, REDUCED, 0)]
        op = self.op()

        def run():
            self.divide(self.input)
            self.finish(dist.all_reduce(self.input, op, async_op=self.is_async))
        self.run = run

    def set_up_reduce(self):
        self.output = self.input = self.make(self.all)
        if RANK == 0:
            self.expected = [(0, self.all, REDUCED, 0)]
        op = self.op()

        def run():
            self.divide(self.input)
            self.finish(dist.reduce(self.input, 0, op, async_op=self.is_async))
        self.run = run

    def set_up_broadcast(self):
        self.output = self.input = self.make(self.all)
        self.expected = [(0, self.all, 0, 0)]
        self.run = lambda: self.finish(
            dist.broadcast(self.input, 0, async_op=self.is_async))

    def set_up_all_gather(self):
        self.input, self.output = self.make(self.part), self.make(self.all)
        self.expect_parts(0)
        self.run = lambda: self.finish(all_gather_single(
            self.output, self.input, async_op=self.is_async))

    def set_up_reduce_scatter(self):
        self.input, self.output = self.make(self.all), self.make(self.part)
        self.expected = [(0, self.part, REDUCED, RANK * self.part)]
        op = self.op()

        def run():
            self.divide(self.input)
            self.finish(reduce_scatter_single(
                self.output, self.input, op, async_op=self.is_async))
        self.run = run

    def set_up_all_to_all(self):
        self.input, self.output = self.make(self.all), self.make(self.all)
        self.expect_parts(RANK)
        self.run = lambda: self.finish(dist.all_to_all_single(
            self.output, self.input, async_op=self.is_async))

    def set_up_gather(self):
        self.input, parts = self.make(self.part), None
        if RANK == 0:
            self.output = self.make(self.all)
            parts = list(self.output.chunk(SIZE))
            self.expect_parts(0)
        self.run = lambda: self.finish(
            dist.gather(self.input, parts, 0, async_op=self.is_async))

    def set_up_scatter(self):
        self.output, parts = self.make(self.part), None
        if RANK == 0:
            self.input = self.make(self.all)
            parts = list(self.input.chunk(SIZE))
        self.expected = [(0, self.part, 0, RANK * self.part)]
        self.run = lambda: self.finish(
            dist.scatter(self.output, parts, 0, async_op=self.is_async))

    def set_up_send_recv(self):
        # Rank 0 times the whole way there and back.
        self.share = 0.5 if RANK == 0 else 0
        if RANK > 1:
            self.run = lambda: None
            return
        self.input, self.output = self.make(self.all), self.make(self.all)
        peer = 1 - RANK
        self.expected = [(0, self.all, peer, 0)]

        def there():
            if self.is_async:
                dist.isend(self.input, peer).wait()
            else:
                dist.send(self.input, peer)

        def back():
            if self.is_async:
                dist.irecv(self.output, peer).wait()
            else:
                dist.recv(self.output, peer)
        first, second = (there, back) if RANK == 0 else (back, there)

        def run():
            first()
            second()
        self.run = run

    def values(self, source, begin, length):
        hashed = torch.arange(begin, begin + length, dtype=torch.int64)
        hashed.add_(977 * (source + 1)).mul_(2654435761)
        hashed.bitwise_xor_(hashed >> 32).bitwise_right_shift_(16)
        if self.reduce_op == "product":
            return hashed.bitwise_and_(1).add_(1)
        return hashed.bitwise_and_(3)

    def fill(self):
        if self.output is not None:
            self.output.zero_()
        if self.input is not None:
            for begin in range(0, self.input.numel(), CHUNK):
                part = self.input[begin:begin + CHUNK]
                part.copy_(self.values(RANK, begin, part.numel()))

    def clear(self):
        for tensor in (self.input, self.output):
            if tensor is not None:
                tensor.zero_()

    def wanted(self, source, begin, length):
        if source != REDUCED:
            return self.values(source, begin, length)
        result = self.values(0, begin, length)
        for other in range(1, SIZE):
            result = COMBINE[self.reduce_op](
                result, self.values(other, begin, length))
        return result.double() / SIZE if self.reduce_op == "avg" else result

    def count_wrong(self):
        wrong, first = 0, ""
        for begin, length, source, source_begin in self.expected:
            for offset in range(0, length, CHUNK):
                count = min(CHUNK, length - offset)
                got = self.output[begin + offset:begin + offset + count]
                want = self.wanted(
                    source, source_begin + offset, count).to(got.dtype)
                if self.reduce_op == "avg" and source == REDUCED:
                    differs = ~torch.isclose(
                        got.double(), want.double(), rtol=0.02, atol=0.02)
                else:
                    differs = got != want
                found = int(differs.sum())
                if found and not wrong:
                    index = int(differs.byte().argmax())
                    first = (f"element {begin + offset + index} is "
                             f"{got[index].item()}, not {want[index].item()}")
                wrong += found
        return wrong, first


def meet(moment, after_ns):
    """Does what meet() of rank/main.cpp does."""
    moment[0] = time.monotonic_ns()
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    if after_ns:
        start = int(moment[0]) + after_ns
        while time.monotonic_ns() < start:
            pass


def answer_to(request):
    one = OperationCase(request)
    answer = {"wrong": 0}
    if request["check"]:
        one.fill()
        one.run()
        answer["wrong"], first = one.count_wrong()
        if first:
            answer["first_wrong"] = first
    one.clear()
    moment = torch.zeros(1, dtype=torch.int64)
    start_after = request["start_after_us"] * 1000
    times = []
    for i in range(-request["warmup"], request["iterations"]):
        meet(moment, start_after)
        begin = time.monotonic_ns()
        one.run()
        took = time.monotonic_ns() - begin
        if i >= 0:
            times.append(int(took * one.share))
    answer["ns"] = times
    return answer


def main():
    # Ctrl-C ends the bench, which ends this process; no rank prints a
    # traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    timeout = datetime.timedelta(milliseconds=int(sys.argv[1]))
    backend = sys.argv[2]
    if not dist.is_backend_available(backend):
        say({"id": 0, "usage": True, "error":
             f"torch.distributed of {sys.executable} has no backend {backend}; "
             "install lockstep-torch there, or leave this peer out"})
        return
    dist.init_process_group(backend, timeout=timeout)
    say({"id": 0, "backend": backend, "torch": torch.__version__,
         "python": platform.python_version()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = answer_to(request)
        except Exception as error:  # of any class that the peer throws
            text = str(error).strip().splitlines()
            answer = {"error": text[0] if text else repr(error)}
        say({"id": request["id"], **answer})
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


main()
