"""Reads the metrics of a running job with Prometheus' own parser.

    metrics_peer.py URL

Asks until both ranks have told of steps, and prints what it has read as JSON:
for each metric its type and, for each rank, its value. Exit code 77: there is
no prometheus_client.
"""

import json
import sys
import time
import urllib.request

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    print(error)
    sys.exit(77)


def read(url):
    with urllib.request.urlopen(url, timeout=20) as response:
        kind = response.headers["Content-Type"]
        assert kind == "text/plain; version=0.0.4; charset=utf-8", kind
        text = response.read().decode()
    metrics = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            metrics.setdefault(sample.name, {"type": family.type, "ranks": {}})
            rank = sample.labels.get("rank", "")
            assert rank not in metrics[sample.name]["ranks"], sample
            metrics[sample.name]["ranks"][rank] = sample.value
            metrics[sample.name]["run_id"] = sample.labels["run_id"]
    return metrics


def main():
    deadline = time.monotonic() + 20
    metrics = {}
    while time.monotonic() < deadline:
        metrics = read(sys.argv[1])
        if len(metrics.get("lockstep_steps_total", {"ranks": {}})["ranks"]) == 2:
            break
        time.sleep(0.05)
    print(json.dumps(metrics))


main()
