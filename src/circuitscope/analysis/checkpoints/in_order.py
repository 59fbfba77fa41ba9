"""Rows of many checkpoints in order of step, read one after the other or several at once.

Torch and the kernels release Python's lock while they compute, so reading one checkpoint on each thread is faster than
reading one on all threads: what only Python does for one of them runs beside what is computed for another.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import psutil
import torch

from circuitscope.analysis.registry import Row
from circuitscope.devices import reading_device
from circuitscope.models.config import ModelConfig
from circuitscope.models.stack import HookedStack
from circuitscope.progress import telling
from circuitscope.runs.damage import DamagedFile
from circuitscope.runs.run import Run

Item = TypeVar("Item")
Result = TypeVar("Result")
_ACTIVATIONS = 32  # floats per token and channel of the stream that one layer and what is read of it hold at a time
_MOST = 8  # about an eighth of the work on a checkpoint is Python's own, which only one thread can do at a time


class LeftOut(Exception):
    """A checkpoint cannot be read and is left out; the message says which one and why."""


def load_weights(model: HookedStack, run: Run, step: int) -> None:
    """Loads into a model the weights that a run had after `step` updates."""
    try:
        run.load_into(model, step)
    except (DamagedFile, OSError) as error:
        raise LeftOut(f"checkpoint {step} left out: {' '.join(str(error).split())}") from None


def rows_in_order(
    run: Run,
    steps: Sequence[int],
    rows_of: Callable[[HookedStack], Iterable[Row]],
    at_once: int = 1,
    tell: Callable[[str], None] = lambda what: None,
) -> Generator[tuple[int, list[Row] | LeftOut], None, None]:
    """Rows of each checkpoint, or why it is left out; memory grows with `at_once`, not with the number of steps.

    Args:
        tell: is told, in a few words, what is being done.
    """
    models: SimpleQueue[HookedStack] = SimpleQueue()
    at_once = min(at_once, len(steps))
    for _ in range(at_once):
        models.put(run.empty_model())

    def read(step: int) -> tuple[int, list[Row] | LeftOut]:
        model = models.get()
        try:
            load_weights(model, run, step)
            with telling(lambda what: tell(f"step {step}, {what}")):
                return step, list(rows_of(model))
        except LeftOut as error:
            return step, error
        finally:
            models.put(model)

    yield from in_order(read, steps, at_once) if at_once > 1 else map(read, steps)


def readable_at_once(model: ModelConfig, tokens: int) -> int:
    """How many checkpoints are best read at once: one per thread of torch, up to _MOST, and as memory allows.

    On a GPU it is one: the GPU computes one thing after the other, and its memory is smaller.

    Args:
        tokens: how many tokens a model is run on.
    """
    if reading_device().type != "cpu":
        return 1
    one = 4 * tokens * model.d_model * _ACTIVATIONS
    return max(1, min(torch.get_num_threads(), _MOST, int(psutil.virtual_memory().available // (2 * one))))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> Iterator[Result]:
    """What `work` makes of each item, in the order of the items, on `at_once` threads that share torch's threads.

    At most `at_once` + 2 items are started before the first result is taken. When the iterator is closed, or an error
    ends it, it waits for the items that were started and drops the others.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // at_once))  # for every thread that starts from now on
    pool = ThreadPoolExecutor(at_once)
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > at_once + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
