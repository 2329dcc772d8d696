"""Prints as JSON what Python's samplers yield over a grid."""

import itertools
import json

import torch
from torch.utils.data import (BatchSampler, RandomSampler, SequentialSampler,
                              SubsetRandomSampler, WeightedRandomSampler)
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


def distributed_grid():
    for size, replicas in itertools.product(SIZES, range(1, 9)):
        for rank, drop_last in itertools.product(range(replicas),
                                                 (False, True)):
            yield case(size, replicas, rank, False, 0, 0, drop_last)
            for seed, epoch in itertools.product(SEEDS, EPOCHS):
                yield case(size, replicas, rank, True, seed, epoch, drop_last)
    # Sums below zero, and a size beyond the 16-bit range.
    yield case(10, 3, 1, True, -3, 1, False)
    yield case(70001, 2, 1, True, 5, 2, False)


def seeded(seed, epoch):
    return torch.Generator().manual_seed(seed + epoch)


def random_grid():
    for size, seed, epoch in itertools.product([1, 2, 7, 100, 70001], SEEDS,
                                               EPOCHS):
        for samples, replacement in itertools.product(
                {None, 1, 31, 32, 100, 250}, (False, True)):
            sampler = RandomSampler(range(size), replacement, samples,
                                    seeded(seed, epoch))
            if size < 70001 or samples is None:
                yield {"size": size, "seed": seed, "epoch": epoch,
                       "num_samples": samples, "replacement": replacement,
                       "indices": list(sampler)}


def subset_grid():
    for subset in ([], [5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(50, 150))):
        for seed, epoch in itertools.product(SEEDS, EPOCHS):
            sampler = SubsetRandomSampler(subset, seeded(seed, epoch))
            yield {"subset": subset, "seed": seed, "epoch": epoch,
                   "indices": list(sampler)}


def weighted_grid():
    random = torch.Generator().manual_seed(0)
    lists = [[1.0], [0.1, 0.9, 0.4, 0.7, 3.0, 0.6], [0.0, 2.0, 0.0, 1.0],
             torch.rand(1000, generator=random, dtype=torch.double).tolist()]
    for weights, seed, epoch in itertools.product(lists, SEEDS, EPOCHS):
        positive = sum(weight > 0 for weight in weights)
        for samples, replacement in [(1, True), (1, False), (700, True),
                                     (positive, False)]:
            sampler = WeightedRandomSampler(weights, samples, replacement,
                                            seeded(seed, epoch))
            yield {"weights": weights, "seed": seed, "epoch": epoch,
                   "num_samples": samples, "replacement": replacement,
                   "indices": list(sampler)}


def batch_grid():
    for size, batch_size, drop_last in itertools.product(
            [0, 1, 9, 10, 11], [1, 3, 5, 20], (False, True)):
        sampler = BatchSampler(SequentialSampler(range(size)), batch_size,
                               drop_last)
        yield {"size": size, "batch_size": batch_size, "drop_last": drop_last,
               "length": len(sampler), "batches": list(sampler)}


print(json.dumps({"distributed": list(distributed_grid()),
                  "random": list(random_grid()),
                  "subset": list(subset_grid()),
                  "weighted": list(weighted_grid()),
                  "batch": list(batch_grid())}))
