"""Generators that work without gradients and leave the caller's mode alone."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(make: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """A generator function whose own work is done without gradients; the body of the caller's loop keeps its mode."""

    @wraps(make)
    def advance(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = iter(make(*args, **kwargs))
        while True:
            with torch.no_grad():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    return advance
