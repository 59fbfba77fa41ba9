"""Ctrl-C ends the program with one line and exit code 130, at whatever moment it comes.

This module is imported before everything else and imports almost nothing.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CODE = 128 + signal.SIGINT
LINE = "circuitscope: interrupted"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While nothing is being written, as during imports, Ctrl-C ends the process without any ado."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: _leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def no_more_tracebacks() -> None:
    """From now on Ctrl-C kills the process, for use at the end of the program, when there is nobody to catch it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave() -> None:
    try:
        os.write(2, f"{LINE}\n".encode())
    finally:
        os._exit(CODE)
