"""How torch binds ranks on hosts that are described in folders.

    numa_peer.py ROOT CPUS [ROOT CPUS]...

ROOT has the files of /sys and /proc of a host, CPUS are those that the process
may use there. Prints "MODE GPU CPUS" for each mode and GPU, or "refused".
"""

import os
import sys
import types

import torch
from torch.numa import binding

open_file, list_folder = open, os.listdir


def inside(path):
    return root + path if path.startswith("/sys/") else path


def properties(index):
    domain, bus, device = gpus[index].split(":")
    return types.SimpleNamespace(
        pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16),
        pci_device_id=int(device.split(".")[0], 16))


binding.open = lambda path: open_file(inside(path))
os.listdir = lambda path: list_folder(inside(path))
os.sched_getaffinity = lambda _: allowed
torch.cuda.device_count = lambda: len(gpus)
torch.cuda.get_device_properties = properties

for root, cpus_of_host in zip(sys.argv[1::2], sys.argv[2::2]):
    allowed = {int(cpu) for cpu in cpus_of_host.split(",")}
    gpus = sorted(os.listdir(root + "/proc/driver/nvidia/gpus"))
    for mode in binding.AffinityMode:
        for gpu in range(len(gpus)):
            try:
                cpus = binding._get_logical_cpus_to_bind_to(
                    gpu_index=gpu,
                    numa_options=binding.NumaOptions(affinity_mode=mode))
                text = ",".join(map(str, sorted(cpus)))
            except RuntimeError:
                text = "refused"
            print(mode.value, gpu, text)
