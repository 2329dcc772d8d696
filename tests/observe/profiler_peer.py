"""The Python side of profiler_parity_test.cpp.

    profiler_peer.py FOLDER

Reads FOLDER/asked.json. Writes FOLDER/states.json, what torch.profiler.schedule
says of each schedule and step, and FOLDER/python.json, the trace of a training.
"""

import json
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile, schedule

ORDER = [ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD,
         ProfilerAction.RECORD_AND_SAVE]


def main():
    folder = pathlib.Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    warnings.simplefilter("ignore")  # of schedules without warm-up
    states = []
    for arguments in asked["schedules"]:
        action = schedule(**arguments)
        states.append([ORDER.index(action(step))
                       for step in range(asked["steps"])])
    (folder / "states.json").write_text(json.dumps(states))

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/python_store",
                            rank=0, world_size=1)
    parameters = [torch.ones(sizes, requires_grad=True)
                  for sizes in ([16, 8], [16], [4, 16], [4])]
    x, y = torch.ones(2, 8), torch.ones(2, 4)

    def step():
        for each in parameters:
            each.grad = None
        hidden = torch.relu(torch.nn.functional.linear(x, *parameters[:2]))
        output = torch.nn.functional.linear(hidden, *parameters[2:])
        loss = torch._C._nn.mse_loss(output, y, 1)
        loss.backward(torch.ones([]))

    step()
    with profile(
            schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
            record_shapes=True,
            on_trace_ready=lambda made: made.export_chrome_trace(
                str(folder / "python.json"))) as profiler:
        for _ in range(4):
            step()
            profiler.step()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


main()
