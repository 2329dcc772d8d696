"""docs/names.md beside the installed torch.

    python_names.py PAGE

Every name in a column "Python" exists; and what torch has of the things that
the page is about is on the page: in a table, or among what is not there yet.
"""

import inspect
import os
import pathlib
import re
import sys
import tempfile

# torch.distributed.pipelining makes this folder when it is imported.
cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name

import torch
import torch.amp
import torch.distributed as dist
import torch.distributed.algorithms
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.multiprocessing
import torch.nn.parallel
import torch.nn.utils
import torch.profiler
import torch.utils.checkpoint
import torch.utils.data
import torch.utils.data.distributed
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging import (
    averagers, hierarchical_model_averager)
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.distributed.run import get_args_parser
from torch.distributed.tensor.experimental import _attention as context
from torch.optim import lr_scheduler, swa_utils

try:
    import torch.utils.tensorboard
except ImportError:  # the package tensorboard is not installed
    pass

HOOKS = [ddp_comm_hooks.default_hooks, ddp_comm_hooks.debugging_hooks,
         ddp_comm_hooks.quantization_hooks, ddp_comm_hooks.powerSGD_hook,
         ddp_zero_hook, post_localSGD_hook]
AVERAGERS = [averagers, hierarchical_model_averager]
PLACES = [dist, torch.nn.parallel, torch.utils.data.distributed,
          torch.utils.data, torch.utils, torch.multiprocessing, torch.nn,
          torch.optim, torch.amp, torch.nn.utils, torch.distributed.optim,
          torch.distributed.fsdp, torch.distributed.pipelining,
          pipeline_schedules,
          torch.distributed.algorithms, context, *HOOKS, *AVERAGERS,
          ddp_comm_hooks, torch.distributed.tensor.parallel,
          device_mesh, torch]
# The page must name all parameters of these functions.
SIGNATURES = [
    dist.init_process_group, dist.new_group, dist.split_group,
    dist.monitored_barrier, dist.barrier, dist.isend, dist.recv,
    torch.nn.parallel.DistributedDataParallel.__init__,
    torch.utils.data.distributed.DistributedSampler.__init__,
    torch.utils.data.DataLoader.__init__,
    torch.utils.data.SequentialSampler.__init__,
    torch.utils.data.RandomSampler.__init__,
    torch.utils.data.SubsetRandomSampler.__init__,
    torch.utils.data.WeightedRandomSampler.__init__,
    torch.utils.data.BatchSampler.__init__, torch.multiprocessing.spawn,
    torch.nn.DataParallel.__init__, torch.nn.parallel.data_parallel,
    torch.nn.SyncBatchNorm.__init__, torch.amp.autocast.__init__,
    torch.amp.GradScaler.__init__, torch.nn.utils.clip_grad_norm_,
    torch.nn.utils.clip_grad_value_,
    torch.distributed.optim.ZeroRedundancyOptimizer.__init__,
    torch.distributed.optim.PostLocalSGDOptimizer.__init__,
    torch.distributed.algorithms.Join.__init__,
    ddp_comm_hooks.powerSGD_hook.PowerSGDState.__init__,
    post_localSGD_hook.PostLocalSGDState.__init__,
    averagers.PeriodicModelAverager.__init__,
    hierarchical_model_averager.HierarchicalModelAverager.__init__,
    *(getattr(lr_scheduler, name).__init__ for name in lr_scheduler.__all__),
    swa_utils.SWALR.__init__, swa_utils.AveragedModel.__init__,
    swa_utils.update_bn, swa_utils.get_ema_avg_fn,
    torch.profiler.profile.__init__, torch.profiler.schedule,
    torch.utils.checkpoint.checkpoint,
    torch.utils.checkpoint.checkpoint_sequential]
METHODS = [torch.nn.parallel.DistributedDataParallel,
           torch.multiprocessing.ProcessContext, torch.nn.DataParallel,
           torch.nn.SyncBatchNorm, torch.amp.GradScaler, dist.GradBucket,
           torch.distributed.optim.ZeroRedundancyOptimizer,
           torch.distributed.optim.PostLocalSGDOptimizer,
           torch.distributed.algorithms.Join]
# Names of Python alone: its own module, and names that only annotate types.
NOT_OF_THE_PAGE = {"self", "kwargs", "GroupName", "record_comm", "reduce_op"}


def torchrun_options():
    return {option for action in get_args_parser()._actions
            for option in action.option_strings if "_" not in option}


def find(name):
    for place in PLACES:
        found = place
        try:
            for part in name.split("."):
                found = getattr(found, part)
            return found
        except AttributeError:
            pass
    raise AttributeError(name)


def unknown(name):
    """Why `name` of the column is not one of Python's, or None."""
    if name.startswith("-"):
        return None if name in torchrun_options() else "no option of torchrun"
    if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*|RANK", name):
        return None  # an environment variable
    if name.startswith("torchvision."):
        return None  # is not installed beside the tests
    if (name.startswith("tensorboard.")
            and not hasattr(torch.utils, "tensorboard")):
        return None
    call = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", name)
    if not call:
        return "not understood"
    try:
        found = find(call[1].removeprefix("torch."))
    except AttributeError:
        return "torch has no such name"
    for parameter in re.findall(r"(\w+)=", call[2] or ""):
        if parameter not in inspect.signature(found).parameters:
            return f"has no parameter {parameter}"
    return None


def defined_in(module):
    """What is public in `module`, and no import of its."""
    return (name for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
            and not name.startswith("_"))


def expected():
    yield from distributed_c10d.__all__
    yield from lr_scheduler.__all__
    yield from swa_utils.__all__
    for module in [*HOOKS, *AVERAGERS]:
        yield from defined_in(module)
    yield from torchrun_options()
    for function in SIGNATURES:
        for parameter in inspect.signature(function).parameters:
            if not parameter.startswith("_"):
                yield parameter
    for each in METHODS:
        yield from (name for name in vars(each) if not name.startswith("_"))


def main():
    page = pathlib.Path(sys.argv[1])
    text = page.read_text()
    mistakes, columns, names = [], None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if columns is None:
            columns = cells
            continue
        for name in re.findall(r"`([^`]+)`",
                               dict(zip(columns, cells)).get("Python", "")):
            names += 1
            why = unknown(name)
            if why:
                mistakes.append(f"{page}:{number}: {name}: {why}")
    for name in sorted(set(expected()) - NOT_OF_THE_PAGE):
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            mistakes.append(f"{page}: says nothing of Python's {name}")
    if not names:
        mistakes.append(f"{page}: no column \"Python\"")
    print(*mistakes, sep="\n")
    return 1 if mistakes else 0


sys.exit(main())
