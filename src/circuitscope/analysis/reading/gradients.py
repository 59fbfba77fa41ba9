"""Work with or without gradients, whatever the caller's gradient mode is, and without changing it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from circuitscope.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Turns gradients on, also under the caller's torch.no_grad or torch.inference_mode.

    A tensor from inference mode cannot take part in them: the caller clones what it got, and a model that was made or
    loaded there is refused.
    """
    if any(p.is_inference() for p in model.parameters()):
        raise UserError("this needs gradients, and the model was made under torch.inference_mode; make it outside")
    with torch.inference_mode(False), torch.enable_grad():
        yield


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
