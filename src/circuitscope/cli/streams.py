"""Standard output and error of the program: always there, able to print any character, and no reason to give up work.

Output that cannot be written (a full disk, a closed descriptor) is dropped, and the command goes on: a run that trains
for hours must not end because of its log. At its end the program says so and exits with code 1. Only a reader that
goes away, as in `circuitscope train | head -1`, stops a command.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Kept(io.FileIO):
    """A file descriptor that takes everything; `failed` is the first error of writing to it."""

    failed: OSError | None = None

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]
        if self.failed is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failed = error
                if isinstance(error, BrokenPipeError):
                    raise
        return memoryview(data).nbytes


@contextmanager
def kept_streams() -> Iterator["Streams"]:
    """Puts such streams in the place of standard output and error, and takes them away again.

    A stream that somebody else has put there, such as a test, stays.
    """
    _fill_closed_descriptors()
    before = sys.stdout, sys.stderr
    streams = Streams()
    if before[0] is sys.__stdout__:
        sys.stdout, streams.out = _kept(before[0], 1, errors="replace")
    if before[1] is sys.__stderr__:
        sys.stderr, _ = _kept(before[1], 2, errors="backslashreplace")
    try:
        yield streams
    finally:
        with suppress(OSError):
            streams.flush()
        sys.stdout, sys.stderr = before


class Streams:
    """What became of standard output."""

    out: Kept | None = None

    def flush(self) -> OSError | None:
        """Writes what is left; gives the error if something could not be written."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError as error:
            return error
        return self.out.failed if self.out is not None else None


def _kept(stream: TextIO | None, descriptor: int, errors: str) -> tuple[io.TextIOWrapper, Kept | None]:
    """The stream that takes everything; a terminal never fills up, so there only the characters are seen to."""
    if isinstance(stream, io.TextIOWrapper) and stream.isatty():
        stream.reconfigure(errors=errors)
        return stream, None
    kept = Kept(descriptor if stream is None else stream.fileno(), "w", closefd=False)
    options: dict[str, Any] = {}
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError):
            stream.flush()
        options = {
            "encoding": stream.encoding,
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
        }
    unbuffered = options.get("write_through", False)
    return io.TextIOWrapper(kept if unbuffered else io.BufferedWriter(kept), errors=errors, **options), kept  # type: ignore[arg-type]


def _fill_closed_descriptors() -> None:
    """Opens the standard descriptors that are closed, so that no file of a run gets one of their numbers.

    They are opened for reading: to write there is an error, as it would be with a closed one.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            opened = os.open(os.devnull, os.O_RDONLY)  # the lowest free number, so this one
            os.set_inheritable(opened, True)
