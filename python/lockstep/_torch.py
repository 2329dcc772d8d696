"""Makes the backends known to torch.distributed.

torch calls register() when it is imported (entry point `torch.backends`). The
extension module, and with it the library, is loaded when a program asks for a
backend.
"""

import atexit
import functools
import os
import sys
import warnings

# Names in torch.distributed, and in Lockstep's own registry.
BACKENDS = {"lockstep": "lockstep", "lockstep_shm": "shm"}


def register():
    """Registers the backends; `import torch` goes on whatever happens."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            _register(dist)
    except Exception as error:
        warnings.warn(f"lockstep is not a backend of torch.distributed here: "
                      f"{type(error).__name__}: {error}", stacklevel=2)


def _register(dist):
    for name, kind in BACKENDS.items():
        # `devices` is a list because torch 2.13 takes a string letter by letter.
        dist.Backend.register_backend(name, functools.partial(_create, kind),
                                      extended_api=True, devices=["cpu"])
    if not _mismatch():
        _give_default_backends(dist.distributed_c10d)
        _allow_monitored_barrier(dist)


def _create(kind, options, backend_options):
    if backend_options is not None:
        raise TypeError(f"pg_options is {backend_options!r}; the backends of "
                        "lockstep have no options: leave it out")
    backend = _extension().create(options, kind)
    _lend_memory_to_reducers()
    return backend


def _lend_memory_to_reducers():
    """Lets DistributedDataParallel ask the backend for the memory of its buckets.

    torch 2.13 does so if this variable is "0". With GPUs it would ask NCCL, too,
    so there the variable is left to the user.
    """
    import torch

    if torch.cuda.device_count() == 0:
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def _mismatch():
    """Returns why the extension does not fit this torch, or an empty text."""
    import torch

    from lockstep._version import version

    built_for = version.partition("+torch")[2]
    here = torch.__version__.partition("+")[0]
    if built_for == here:
        return ""
    return (f"lockstep-torch {version} was built for torch {built_for}, and "
            f"this is torch {torch.__version__}; install the lockstep-torch "
            f"whose version ends in +torch{here}")


@functools.cache
def _extension():
    if mismatch := _mismatch():
        raise RuntimeError(mismatch)
    try:
        from lockstep import _C
    except ImportError as error:
        raise RuntimeError(
            f"the library of lockstep-torch cannot be loaded: {error}; install "
            "lockstep-torch again") from None
    atexit.register(_leave, _C)
    return _C


def _leave(extension):
    # A program that ends by an exception must not wait for what its peers
    # will never give. sys.exit() leaves no trace here.
    extension.leave_all(getattr(sys, "last_value", None) is not None)


def _give_default_backends(c10d):
    """Gives groups such as "cpu:gloo" a default backend.

    As soon as any backend is registered, torch 2.13 gives none to a group whose
    backends are named by device: such a group has no name, and warns.
    """
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def with_default_backend(*arguments, **keywords):
        group, store = make(*arguments, **keywords)
        if (isinstance(group, c10d.ProcessGroup)
                and group._get_backend_name() == "undefined"):
            first = c10d.get_backend_config(group).split(",")[0]
            name = first.partition(":")[2]
            group._set_default_backend(c10d.Backend.backend_type_map[name])
        return group, store

    c10d._new_process_group_helper = with_default_backend


def _allow_monitored_barrier(dist):
    """Lets monitored_barrier() pass the backends of lockstep, too."""
    import torch

    c10d = dist.distributed_c10d
    gloos = c10d.monitored_barrier

    @functools.wraps(gloos)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        if not c10d._rank_not_in_group(group):
            own = c10d._get_default_group() if group is None else group
            if any(f"cpu:{name}" in c10d.get_backend_config(own).split(",")
                   for name in BACKENDS):
                if timeout is None:
                    timeout = c10d._get_default_timeout("lockstep")
                return own.monitored_barrier(timeout, wait_all_ranks)
        return gloos(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
