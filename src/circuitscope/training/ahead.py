"""What the coming steps need, made in a background thread while the step before them is computed.

A batch is a function of the step, so making it early changes nothing. On a GPU its copy from pinned memory begins in
the same thread, and no step waits for it.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
AHEAD = 2  # steps that are prepared before they are asked for


class Ahead(Generic[T]):
    """What each step needs; asking for one begins the next.

    Args:
        make: makes what a step needs.
        steps: the number of steps; nothing is made beyond them.
        device: where the results go. A thread begins with the first GPU as its current one, so it is told.
    """

    def __init__(self, make: Callable[[int], T], steps: int, device: torch.device):
        self._make, self._steps = make, steps
        gpu = torch.cuda.current_device() if device.type == "cuda" else None
        begin = None if gpu is None else functools.partial(torch.cuda.set_device, gpu)
        self._thread = ThreadPoolExecutor(1, "batches", begin)
        self._coming: dict[int, Future[T]] = {}

    def __getitem__(self, step: int) -> T:
        """What a step needs. An error that came up while it was made is raised here."""
        ready = self._coming.pop(step, None)
        if ready is None:  # the first step, or a jump to another
            self._coming.clear()
        found = self._make(step) if ready is None else ready.result()
        for later in range(step + 1, min(step + 1 + AHEAD, self._steps)):
            if later not in self._coming:
                self._coming[later] = self._thread.submit(self._make, later)
        return found
