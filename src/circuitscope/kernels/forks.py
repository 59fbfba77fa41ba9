"""Kernels in a forked process: on one thread, because a fork takes no threads along.

A fork copies the memory of a process but only the thread that called it. GNU OpenMP, which torch and Numba share on
Linux, does not notice: it waits forever in the child for threads that are not there, and Numba ends such a child. So
after a fork (`multiprocessing` with its method "fork", a torch DataLoader with workers) torch's thread count is set to
1 in the child, as a DataLoader does itself, and kernels run there in a version that is compiled for one thread. Its
results are the same up to rounding. (Numba's other layer, TBB, survives a fork, but torch's OpenMP would still not,
so it would not help.) Processes that are started with "spawn" or "forkserver" begin anew and have all threads.
"""

import logging
import os

import torch

_computed = False  # whether this process may have started threads of OpenMP
_forked = False  # whether it is the child of one that had
_line = ""


def computing() -> None:
    """To be called where a kernel or a model computes: from then on a fork leaves threads behind."""
    global _computed
    _computed = True


def threads_left_behind() -> bool:
    """Whether this process must do with one thread because of a fork. If more were in use before, it says so once."""
    global _line
    if _line:
        logging.getLogger("circuitscope.kernels").warning(_line)
        _line = ""
    return _forked


def _in_child() -> None:
    global _forked, _line
    if not _computed:
        return
    _forked = True
    if (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        _line = (
            f"kernels use 1 thread in this process, not {threads}, because it was forked;"
            ' start processes with the method "spawn" or "forkserver" to use more'
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
