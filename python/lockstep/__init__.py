"""Lockstep for Python: backends of torch.distributed, and the command.

Nothing here need be imported: torch finds the backends by itself. A program
names one of them:

    torch.distributed.init_process_group("lockstep")
"""
