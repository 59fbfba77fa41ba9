"""(c) Batch generation as a share of a step, (d) generation against a generator that tiles, and its limits."""

import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.profile_step import section_seconds
from benchmarks.rows import Row, Section, alternate, duration, faster, limit, spread
from benchmarks.workload import SHAPES, trainer_at
from circuitscope.tasks import MQAR, NO_LABEL

_TILING = "the other side tiles both vocabularies per example and draws by np.apply_along_axis(choice, replace=False)"


def measure(quick: bool) -> Section:
    return Section([_share(quick), *_against_tiling(quick), *_many(quick)])


def _share(quick: bool) -> Row:
    shape = SHAPES[0]
    with trainer_at(shape) as trainer:
        seconds = section_seconds(trainer, 3 if quick else 200)
    whole = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    shares = [a / b for a, b in zip(seconds["batch"], whole, strict=True)]
    return Row(
        f"batch generation in a step, {shape}",
        duration(seconds["batch"]),
        duration(whole),
        spread(shares, "{:.2%}"),
        "at most 5%",
        statistics.median(shares) <= 0.05,
        "timed inside Trainer.update; the other side is the whole step, batch included",
    )


def _against_tiling(quick: bool) -> list[Row]:
    task, count = MQAR(length=64, pairs=4), 50 if quick else 2000
    seeds = itertools.count()

    def ours() -> None:
        task.batch(0, size=count, seed=next(seeds))

    old = np.random.RandomState(0)  # its choice is np.random.choice
    new = np.random.default_rng(0)
    sides: list[Callable[[], object]] = [
        ours,
        lambda: tiled_mqar(old.choice, count, task),
        lambda: tiled_mqar(new.choice, count, task),
    ]
    _check_tiled(tiled_mqar(old.choice, 20, task), task)
    mine, legacy, generator = alternate(sides, 1 if quick else 9)
    return [
        faster(f"{count:,} MQAR examples (64, 4)", mine, legacy, 50, f"{_TILING}, with np.random.choice"),
        faster(
            f"{count:,} MQAR examples (64, 4), newer choice",
            mine,
            generator,
            None,
            f"{_TILING}, with numpy's newer Generator.choice, which does not permute the vocabulary; for information",
        ),
    ]


def tiled_mqar(choice: Callable[..., Any], count: int, task: MQAR) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [example, pos], as commonly written: a copy of the vocabulary for every example."""
    k, length, half = task.pairs, task.length, task.vocab_size // 2

    def draw(tokens: NDArray[np.int64], **weights: Any) -> NDArray[np.int64]:
        return np.apply_along_axis(choice, 1, np.tile(tokens, (count, 1)), size=k, replace=False, **weights)

    keys, values = draw(np.arange(1, half)), draw(np.arange(half, task.vocab_size))
    slots = (length - 2 * k) // 2
    p = np.arange(1, slots + 1) ** (task.power - 1)
    asked = 2 * k + 2 * draw(np.arange(slots), p=p / p.sum())
    tokens = np.zeros((count, length), dtype=np.int64)
    tokens[:, 0 : 2 * k : 2], tokens[:, 1 : 2 * k : 2] = keys, values
    np.put_along_axis(tokens, asked, keys, axis=1)
    labels = np.full((count, length), NO_LABEL, dtype=np.int64)
    np.put_along_axis(labels, asked, values, axis=1)
    inputs = torch.from_numpy(tokens)
    empty = inputs == 0
    inputs[empty] = torch.randint(task.vocab_size, inputs.shape)[empty]
    return inputs, torch.from_numpy(labels)


def _check_tiled(made: tuple[torch.Tensor, torch.Tensor], task: MQAR) -> None:
    """Both sides make the same thing: every query's label is the value bound to its key."""
    tokens, labels = made
    for row, answers in zip(tokens, labels, strict=True):
        bound = dict(zip(row[0 : 2 * task.pairs : 2].tolist(), row[1 : 2 * task.pairs : 2].tolist(), strict=True))
        where = (answers != NO_LABEL).nonzero().flatten()
        if [bound[int(token)] for token in row[where]] != answers[where].tolist() or len(where) != task.pairs:
            raise RuntimeError("the examples of the tiling generator are not MQAR")


def _many(quick: bool) -> list[Row]:
    task, count = MQAR(length=64, pairs=4, examples=None), 1000 if quick else 100_000
    seconds = []
    for seed in range(1 if quick else 5):
        began = time.perf_counter()
        task.batch(0, size=count, seed=seed)
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    task.batch(0, size=count, seed=0)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    name = f"{count:,} MQAR examples (64, 4)"
    return [
        limit(f"{name}, time", spread(seconds, "{:.3f}", " s"), "under 1 s", statistics.median(seconds) < 1),
        limit(f"{name}, memory", f"{peak:.0f} MB", "under 200 MB", peak < 200, "peak by tracemalloc, result included"),
    ]
