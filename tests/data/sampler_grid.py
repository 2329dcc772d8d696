"""Prints as JSON what Python's DistributedSampler yields over a grid."""

import itertools
import json

from torch.utils.data.distributed import DistributedSampler

SIZES = [0, 1, 2, 3, 7, 10, 100, 1797]
SEEDS = [0, 1, 1234567890123]
EPOCHS = [0, 1, 17]


def case(size, replicas, rank, shuffle, seed, epoch, drop_last):
    sampler = DistributedSampler(range(size), replicas, rank, shuffle=shuffle,
                                 seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return {"size": size, "num_replicas": replicas, "rank": rank,
            "shuffle": shuffle, "seed": seed, "epoch": epoch,
            "drop_last": drop_last, "length": len(sampler),
            "indices": list(sampler)}


def grid():
    for size, replicas in itertools.product(SIZES, range(1, 9)):
        for rank, drop_last in itertools.product(range(replicas),
                                                 (False, True)):
            yield case(size, replicas, rank, False, 0, 0, drop_last)
            for seed, epoch in itertools.product(SEEDS, EPOCHS):
                yield case(size, replicas, rank, True, seed, epoch, drop_last)
    # Sums below zero, and a size beyond the 16-bit range.
    yield case(10, 3, 1, True, -3, 1, False)
    yield case(70001, 2, 1, True, 5, 2, False)


print(json.dumps(list(grid())))
