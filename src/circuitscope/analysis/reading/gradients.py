"""Generators that work without gradients and do not change the caller's gradient mode."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(make: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Makes a generator work without gradients, while the body of the caller's loop keeps its gradient mode."""

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
