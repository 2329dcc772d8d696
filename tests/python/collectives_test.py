"""Every collective of torch.distributed on Lockstep's backends.

Each case runs in two groups of the same ranks, Lockstep's and Gloo's, and must
give the same; what Gloo lacks is compared with what it must be.
"""

import os
import sys
import unittest

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import ranks

CASES = []


def case(function):
    CASES.append(function)
    return function


def data(*shape, dtype=torch.float32, seed=0):
    """Numbers that differ between the ranks, small enough for every dtype."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    numbers = torch.randint(0, 5, shape, generator=generator)
    return numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 1


@case
def all_reduce(group, size):
    results = []
    kinds = {
        dist.ReduceOp.SUM: [torch.float32, torch.float64, torch.float16,
                            torch.bfloat16, torch.int32, torch.int64,
                            torch.uint8, torch.int8],
        dist.ReduceOp.PRODUCT: [torch.float32, torch.int64],
        dist.ReduceOp.MIN: [torch.float32, torch.int64, torch.uint8],
        dist.ReduceOp.MAX: [torch.float64, torch.int32],
        dist.ReduceOp.BAND: [torch.int64, torch.uint8],
        dist.ReduceOp.BOR: [torch.int32],
        dist.ReduceOp.BXOR: [torch.int64],
    }
    for op, dtypes in kinds.items():
        for dtype in dtypes:
            for shape in ((), (3,), (4, 5), (70_000,)):
                tensor = data(*shape, dtype=dtype)
                dist.all_reduce(tensor, op, group=group)
                results.append(tensor)
    complex_numbers = torch.complex(data(3), data(3, seed=1))
    dist.all_reduce(complex_numbers, group=group)
    strided = data(6, 4).t()
    dist.all_reduce(strided, group=group)
    return [*results, complex_numbers, strided]


@case
def all_reduce_async(group, size):
    tensors = [data(1000, seed=i) for i in range(5)]
    works = [dist.all_reduce(each, group=group, async_op=True)
             for each in tensors]
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success()
    return tensors


@case
def future_with_callback(group, size):
    tensor = data(7)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return [doubled.wait(), tensor]


@case
def all_reduce_coalesced(group, size):
    tensors = [data(3), data(2, 2, seed=1), data(1, seed=2)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@case
def all_reduce_sparse(group, size):
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank, 4]], [1.0, 2.0], (5,))
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


@case
def reduce(group, size):
    results = []
    for root in range(size):
        tensor = data(9, seed=root)
        dist.reduce(tensor, root, group=group)
        results.append(tensor if dist.get_rank() == root else tensor[:0])
    return results


@case
def broadcast(group, size):
    results = [data(5, dtype=dtype) for dtype in
               (torch.float32, torch.bool, torch.complex64)]
    for root in range(size):
        for tensor in results:
            dist.broadcast(tensor, root, group=group)
    return results


@case
def all_gather(group, size):
    own = data(2, 3, dtype=torch.int64)
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    whole = own.new_empty(2 * size, 3)
    dist.all_gather_into_tensor(whole, own, group=group)
    flags = [torch.empty(3, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(flags, data(3, dtype=torch.bool), group=group)
    return [*parts, whole, *flags]


@case
def all_gather_coalesced(group, size):
    own = [data(2), data(3, seed=1)]
    lists = [[torch.empty_like(each) for each in own] for _ in range(size)]
    dist.all_gather_coalesced(lists, own, group=group)
    return sum(lists, [])


@case
def gather_and_scatter(group, size):
    results = []
    for root in range(size):
        here = dist.get_rank() == root
        own = data(4, seed=root)
        gathered = [torch.empty(4) for _ in range(size)] if here else None
        dist.gather(own, gathered, dst=root, group=group)
        scattered = torch.empty(4)
        dist.scatter(scattered, gathered, src=root, group=group)
        results += [*(gathered or []), scattered]
    return results


@case
def reduce_scatter(group, size):
    inputs = [data(3, seed=i) for i in range(size)]
    output = torch.empty(3)
    dist.reduce_scatter(output, inputs, group=group)
    whole = torch.empty(2, 3)
    dist.reduce_scatter_tensor(whole, data(2 * size, 3), group=group)
    return [output, whole]


@case
def all_to_all_single(group, size):
    rank = dist.get_rank()
    equal = torch.empty(2 * size)
    dist.all_to_all_single(equal, data(2 * size), group=group)
    # Rank i sends i + 1 rows to each.
    rows = torch.empty(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(
        rows, data(size * (rank + 1), 2), list(range(1, size + 1)),
        [rank + 1] * size, group=group)
    return [equal, rows]


@case
def barriers(group, size):
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    dist.monitored_barrier(group)
    dist.monitored_barrier(group, wait_all_ranks=True)
    return []


@case
def objects(group, size):
    rank = dist.get_rank()
    everywhere = [None] * size
    dist.all_gather_object(everywhere, {"rank": rank, "text": "x" * rank},
                           group=group)
    lists = [rank, "zero"] if rank == 0 else [None, None]
    dist.broadcast_object_list(lists, 0, group=group)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, 0, group=group)
    own = [None]
    dist.scatter_object_list(
        own, [f"for {i}" for i in range(size)] if rank == 0 else None, 0,
        group=group)
    return [everywhere, lists, gathered, own]


@case
def messages(group, size):
    rank = dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return []
    received = [torch.empty(3) for _ in range(4)]
    own = data(3)
    if rank == 0:
        dist.send(own, after, group=group, tag=5)
        sources = [dist.recv(received[0], before, group=group, tag=5)]
    else:
        sources = [dist.recv(received[0], before, group=group, tag=5)]
        dist.send(own, after, group=group, tag=5)
    works = [dist.isend(own, after, group=group),
             dist.irecv(received[1], before, group=group)]
    for work in works:
        work.wait()
    operations = [dist.P2POp(dist.irecv, received[2], before, group),
                  dist.P2POp(dist.isend, 2 * own, after, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier(group)
    # Each rank gets one message from any rank: from the one before.
    work = dist.isend(3 * own, after, group=group, tag=7)
    sources.append(dist.recv(received[3], None, group=group, tag=7))
    work.wait()
    sent = [{"from": rank}]
    got = [None]
    if rank == 0:
        dist.send_object_list(sent, after, group=group)
        dist.recv_object_list(got, before, group=group)
    else:
        dist.recv_object_list(got, before, group=group)
        dist.send_object_list(sent, after, group=group)
    return [*received, sources, got]


@case
def coalescing_manager(group, size):
    tensors = [data(3), data(4, seed=1)]
    with _coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    outputs = [torch.empty(2 * size), torch.empty(size)]
    with _coalescing_manager(group, async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], data(2), group=group)
        dist.all_gather_into_tensor(outputs[1], data(1), group=group)
    manager.wait()
    scattered = [torch.empty(2), torch.empty(1)]
    with _coalescing_manager(group):
        dist.reduce_scatter_tensor(scattered[0], data(2 * size), group=group)
        dist.reduce_scatter_tensor(scattered[1], data(size), group=group)
    return [*tensors, *outputs, *scattered]


@case
def functional_collectives(group, size):
    own = data(2 * size, 3)
    return [
        functional.all_reduce(own, "sum", group),
        functional.all_gather_tensor(own, 0, group),
        functional.all_gather_tensor(own, 1, group),
        functional.reduce_scatter_tensor(own, "sum", 0, group),
        functional.broadcast(own, 0, group),
        functional.all_to_all_single(own, None, None, group),
        *functional.all_reduce_coalesced([own, own + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([own, own + 1], group),
        *functional.reduce_scatter_tensor_coalesced(
            [own, own + 1], "sum", [0, 0], group),
    ]


@case
def empty_tensors(group, size):
    nothing = torch.empty(0)
    dist.all_reduce(nothing, group=group)
    dist.broadcast(nothing, 0, group=group)
    dist.all_gather([torch.empty(0) for _ in range(size)], nothing,
                    group=group)
    return [nothing]


@case
def shared_tensors(group, size):
    """Tensors whose memory the backend gives, where it can."""
    backend = group._get_backend(torch.device("cpu"))
    tensor = data(1000)
    if backend.supports_tensor_alloc(torch.device("cpu")):
        shared = backend.allocate_tensor(1000, dtype=torch.float32,
                                         device=torch.device("cpu"))
        tensor = shared.copy_(tensor)
    dist.all_reduce(tensor, group=group)
    return [tensor]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def in_shared_memory(tensor):
    """Whether the tensor lies in memory that the ranks share."""
    at = tensor.data_ptr()
    for line in open("/proc/self/maps"):
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= at < end:
            return "/memfd:lockstep" in line
    return False


def buckets_of_ddp(group):
    """The gradients of DistributedDataParallel lie in the group's memory."""
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(100, 100), process_group=group,
        gradient_as_bucket_view=True)
    for _ in range(3):  # the second step makes the buckets again
        model(torch.ones(1, 100)).sum().backward()
        assert in_shared_memory(model.module.weight.grad)


def memory_again(group):
    """Memory of a size that recurs goes to the next tensor of that size."""
    cpu = torch.device("cpu")
    backend = group._get_backend(cpu)
    first_values = []
    for _ in range(4):
        tensor = backend.allocate_tensor(5000, dtype=torch.float32, device=cpu)
        assert in_shared_memory(tensor)
        first_values.append(tensor[0].item())
        tensor.fill_(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(group.size()).all(), tensor
    # New memory is 0.
    assert first_values == [0, 0, 0, group.size()], first_values


def beyond_gloo(group, rank, size):
    """What only Lockstep has."""
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    assert mean.eq((size - 1) / 2).all(), mean
    for factor in (0.5, torch.tensor([0.5])):
        half = dist._make_nccl_premul_sum(factor)
        for shape, dtype in (((3,), torch.float32), ((), torch.float32),
                             ((3,), torch.bfloat16)):
            halves = torch.full(shape, float(rank), dtype=dtype)
            dist.all_reduce(halves, half, group=group)
            assert halves.eq(size * (size - 1) / 4).all(), halves
        parts = torch.ones(2 * size, dtype=torch.bfloat16)
        part = torch.empty(2, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, parts, half, group=group)
        assert part.eq(size / 2).all(), part
        try:
            dist.all_reduce(torch.ones(2, dtype=torch.int64), half, group=group)
        except ValueError as error:
            assert "PREMUL_SUM multiplies" in str(error), error
        else:
            raise AssertionError("PREMUL_SUM took integers")
    inputs = [torch.full((2,), float(i)) for i in range(size)]
    output = torch.empty(2)
    dist.reduce_scatter(output, inputs, dist._make_nccl_premul_sum(2.0),
                        group=group)
    assert output.eq(2 * rank * size).all(), output
    assert inputs[-1].eq(size - 1).all(), inputs
    received = [torch.empty(i + 1) for i in range(size)]
    dist.all_to_all(received, [torch.full((rank + 1,), float(i))
                               for i in range(size)], group=group)
    assert all(part.eq(rank).all() for part in received), received
    uneven = [torch.empty(i + 1) for i in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group=group)
    assert all(part.eq(i).all() for i, part in enumerate(uneven)), uneven
    gathered = [torch.empty(size), torch.empty(2 * size)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for i, each in enumerate(gathered):
            dist.all_gather_into_tensor(each, torch.full((i + 1,), float(rank)),
                                        group=group)
    work, = manager.works
    doubled = work.get_future().then(lambda future: future.value()[1] * 2)
    doubled = doubled.wait()
    work.wait()
    assert torch.equal(doubled, gathered[1] * 2), doubled
    assert all(map(torch.equal, work.result(), gathered)), work.result()
    stacked = torch.empty(size, 2)
    dist.all_gather_into_tensor(stacked, torch.full((2,), float(rank)),
                                group=group)
    assert all(row.eq(i).all() for i, row in enumerate(stacked)), stacked
    short = torch.full((3,), rank, dtype=torch.int16)
    dist.broadcast(short, size - 1, group=group)
    assert short.eq(size - 1).all(), short
    cpu = torch.device("cpu")
    if group._get_backend(cpu).supports_tensor_alloc(cpu):  # not with DETAIL
        buckets_of_ddp(group)
        memory_again(group)
    # torch.distributed.split_group() wants an accelerator.
    part = group.split_group(list(range(max(1, size - 1))),
                             group_name="part", group_desc="a part")
    if rank < max(1, size - 1):
        total = torch.ones(1)
        part.allreduce([total]).wait()
        assert total.item() == max(1, size - 1), total
        part.shutdown()


def rank_main(backend):
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == backend, dist.get_backend()
    name = backend.rpartition(":")[2]
    own = dist.group.WORLD
    assert dist.get_backend_config() == f"cpu:{name}"
    assert own._get_backend(torch.device("cpu")).name() == name
    gloo = dist.new_group(backend="gloo")
    for each in CASES:
        ours, gloos = each(own, size), each(gloo, size)
        if len(ours) != len(gloos) or not all(map(equal, ours, gloos)):
            raise AssertionError(f"{each.__name__}: {ours} is not {gloos}")
    beyond_gloo(own, rank, size)
    # The same in a group of some ranks, and in one of another backend.
    for members in ([0], list(range(1, size)), [size - 1, 0]):
        members = sorted(set(members))
        group = dist.new_group(members) if members else None
        if rank in members:
            total = torch.tensor(rank)
            dist.all_reduce(total, group=group)
            assert total == sum(members), (total, members)
            dist.monitored_barrier(group)
    # A world that is made again. With DETAIL, torch's own Gloo group beside ours
    # reads addresses of the first world in the store, and may wait for ever, as
    # with gloo alone.
    dist.destroy_process_group()
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        ranks.leave()
    dist.init_process_group(backend)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()
    ranks.leave()


class Collectives(unittest.TestCase):

    def test_give_what_gloo_gives(self):
        for backend, sizes in (("lockstep", (1, 2, 3)), ("lockstep_shm", (2,)),
                               ("cpu:lockstep", (2,))):
            for size in sizes:
                with self.subTest(backend=backend, ranks=size):
                    ranks.run(self, size, __file__, backend)

    def test_give_it_with_debugging(self):
        ranks.run(self, 2, __file__, "lockstep",
                  TORCH_DISTRIBUTED_DEBUG="DETAIL")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
    else:
        unittest.main()
