"""Kernels under torch.compile: it runs them as they are and compiles what stands around them.

Dynamo, the part of torch.compile that reads Python code, cannot read Numba's, and fails on some of it. A function that
is marked here is not read: the graph ends before it and goes on after it. Importing Dynamo takes a second or two, so a
process that compiles nothing never does.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function one that torch.compile calls but does not look into."""
    unread: list[Callable[P, T]] = []  # the function as Dynamo knows it; made when Dynamo first comes by

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if not unread:
            unread.append(torch.compiler.disable(function))
        return unread[0](*args, **kwargs)

    return call
