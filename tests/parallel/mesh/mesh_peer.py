"""Prints what Python's DeviceMesh says, for every rank of several worlds.

    mesh_peer.py CASES

CASES is JSON on the command line: a list of objects with
  axes     the names and sizes of the axes, [["data", 2], ["tensor", 4]]
  flatten  lists of axes to flatten; the flattened axis is named by these,
           joined by "_"
Prints a list with one object for each case and rank: "axes" gives for each
axis, also the flattened ones, the ranks of the group of that rank and its
place; "coordinate" the places along the axes; "parts" for each pair of axes
the ranks of the submesh. The world is Python's "fake" backend, one process for
all ranks, one after the other.
"""

import itertools
import json
import math
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def of_rank(case, rank):
    names = [name for name, _ in case["axes"]]
    sizes = [size for _, size in case["axes"]]
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes),
                            store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    parts = {name: mesh[name] for name in names}
    for flat in case["flatten"]:
        parts["_".join(flat)] = mesh[tuple(flat)]._flatten()
    said = {
        "rank": rank,
        "coordinate": list(mesh.get_coordinate()),
        "axes": {
            name: {"ranks": dist.get_process_group_ranks(part.get_group()),
                   "place": part.get_local_rank(),
                   "size": part.size()}
            for name, part in parts.items()
        },
        "parts": {
            "_".join(pair): mesh[pair].mesh.flatten().tolist()
            for pair in itertools.combinations(names, 2)
        },
    }
    dist.destroy_process_group()
    return said


def main():
    cases = json.loads(sys.argv[1])
    print(json.dumps([
        [of_rank(case, rank)
         for rank in range(math.prod(size for _, size in case["axes"]))]
        for case in cases
    ]))


main()
