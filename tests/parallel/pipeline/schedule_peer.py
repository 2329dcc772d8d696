"""Writes PyTorch's pipeline schedules, for schedule_parity_test.cpp.

For each schedule and each number of ranks p, micro-batches m and stages a rank
v: a line "NAME P M V", with "refused" if PyTorch refuses the numbers; else the
P lines of the schedule in CSV form and P lines of it with messages.
"""

import csv
import sys
from types import SimpleNamespace

import torch.distributed.pipelining.schedules as schedules


def stages(ranks, per_rank):
    return [
        SimpleNamespace(
            num_stages=ranks * per_rank, group_size=ranks, group_rank=0,
            stage_index=index, stage_index_to_group_rank=None, submod=None)
        for index in range(per_rank)
    ]


def table_of(name, ranks, micro_batches, per_rank):
    """Returns the actions of each rank, and which rank has each stage."""
    made = stages(ranks, per_rank)
    schedule_class = schedules.get_schedule_class(name)
    if name in ("GPipe", "1F1B"):
        table = schedule_class(made[0], micro_batches).pipeline_order
        for rank, actions in table.items():
            kept = [a for a in actions
                    if a.computation_type != schedules.REDUCE_GRAD]
            if name == "1F1B" and rank == ranks - 1:
                # The forwards of the last rank count from 1 in PyTorch's table,
                # though its runtime, which does not use the table, runs them
                # from 0.
                assert kept[0].microbatch_index == 1, kept
                kept = [a._replace(microbatch_index=a.microbatch_index - 1)
                        if a.computation_type == schedules.F else a
                        for a in kept]
            table[rank] = kept
        return table, {rank: rank for rank in range(ranks)}
    schedule = schedule_class(made, micro_batches, None)
    return schedule.pipeline_order, schedule.stage_index_to_group_rank


def main():
    with open(sys.argv[1], "w", newline="") as file:
        rows = csv.writer(file)
        for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B",
                     "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            single = name in ("GPipe", "1F1B")
            for ranks in range(1, 9):
                for micro_batches in range(1, 17):
                    for per_rank in range(1, 2 if single else 5):
                        file.write(f"{name} {ranks} {micro_batches} {per_rank}")
                        try:
                            table, places = table_of(
                                name, ranks, micro_batches, per_rank)
                        except ValueError:
                            file.write(" refused\n")
                            continue
                        file.write("\n")
                        for rank in range(ranks):
                            rows.writerow(table[rank])
                        messages = schedules._add_send_recv(
                            {rank: list(table[rank]) for rank in range(ranks)},
                            lambda stage: places[stage], ranks * per_rank)
                        for rank in range(ranks):
                            rows.writerow(messages[rank])


main()
