"""Makes the imports that a command needs faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off, for imports.

    torch and TransformerLens make hundreds of thousands of objects, and nearly all of them stay. Looking through
    them again and again takes about a seventh of the time of their import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
