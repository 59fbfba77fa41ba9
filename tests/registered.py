"""Registries that a test may add to: afterwards they are as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from circuitscope.registry import Registry


@contextmanager
def added_to(*registries: Registry) -> Iterator[None]:
    """What is registered inside is forgotten at the end."""
    before = [(r, dict(r), dict(r._from)) for r in registries]
    try:
        yield
    finally:
        for registry, things, modules in before:
            registry._things, registry._from = things, modules
