"""What a person sees while they wait for long work: a live bar on a terminal, plain lines elsewhere.

Training, repeating, analyzing and reporting all report their progress to an object of the type `Progress`. Results
(tables, summaries) do not go through this module.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any, Protocol, cast, runtime_checkable

from circuitscope.errors import escaped

_SECONDS = 10.0  # `Lines` prints a line at least this often


@runtime_checkable
class Stream(Protocol):
    """What progress is written to: standard output, a file, a text in memory."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


@runtime_checkable
class Progress(Protocol):
    """Receives reports of how far some work is. It is a context that surrounds the work from start to end."""

    def __enter__(self) -> "Progress": ...
    def __exit__(self, *error: object) -> None: ...

    def start(self, what: str, total: int, done: int | None = None) -> None:
        """Work begins; `what` is a word for it, or empty.

        Training passes the number of steps that were `done` before. An analysis counts checkpoints and passes none.
        """

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        """Training has made `step` updates and saved this many checkpoints; or the checkpoint of `step` is analyzed."""

    def doing(self, what: str) -> None:
        """What is being done within a checkpoint, in a few words; it may come from several threads."""

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        """A model was evaluated on held-out examples; `metric` is the text in which the task shows its metric."""

    def say(self, line: str) -> None:
        """A sentence for people."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, what: str, total: int, done: int | None = None) -> None:
        pass

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        pass

    def doing(self, what: str) -> None:
        pass

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass


class _Counts(Silent):
    """Keeps count: of steps if the work says how many were done before, otherwise of the calls of `advance`."""

    def __init__(self, heading: str = "") -> None:
        self.heading = heading
        self.what, self.total, self.first, self.done = "", 0, 0, 0
        self.by_steps, self.began = False, time.monotonic()

    def start(self, what: str, total: int, done: int | None = None) -> None:
        self.what, self.total, self.by_steps = what, total, done is not None
        self.first = self.done = done or 0
        self.began = time.monotonic()
        if self.heading:
            self.say(self.heading)

    def count(self, step: int) -> None:
        self.done = step if self.by_steps else self.done + 1

    @property
    def rate(self) -> float:
        """Steps or checkpoints per second."""
        return (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)

    @property
    def seconds_left(self) -> float:
        return (self.total - self.done) / self.rate if self.rate else 0.0


class Lines(_Counts):
    """Prints a line at each evaluation, and another one whenever nothing was printed for some seconds.

    Args:
        heading: a line to print once the work begins.
    """

    def __init__(self, stream: Stream | None = None, seconds: float = _SECONDS, heading: str = ""):
        super().__init__(heading)
        self.stream, self.seconds, self.told = stream, seconds, time.monotonic()

    def start(self, what: str, total: int, done: int | None = None) -> None:
        super().start(what, total, done)
        self.told = self.began

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        self.count(step)
        if time.monotonic() - self.told < self.seconds:
            return
        if self.by_steps:
            lost = "" if loss is None else f"  loss {loss:7.4f}"
            self.say(
                f"{self.what}{self.what and ' '}step {step:>6}/{self.total}{lost}  {self._speed()}{_checkpoints(saved)}"
            )
        else:
            self.say(f"{self.what}: step {step}, {self.done} of {self.total} checkpoints")

    def doing(self, what: str) -> None:
        if time.monotonic() - self.told >= self.seconds:
            self.say(f"{self.what}: {what}; {self.done} of {self.total} checkpoints")

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        self.count(step)
        where = f"step {step:>6}/{self.total}"
        self.say(f"{where}  validation loss {loss:7.4f}  {metric}  {self._speed()}{_checkpoints(saved)}")

    def say(self, line: str) -> None:
        self.told = time.monotonic()
        try:
            print(escaped(line), file=self.stream or sys.stdout, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # the disk of the output is full: the work matters more than what is said of it
            pass

    def _speed(self) -> str:
        if self.done == self.first:  # nothing is known yet
            return f"{'':5} {'':7}  {'':4} {'':6}"
        return f"{self.rate:5.1f} steps/s  {self.seconds_left:4.0f} s left"


class Bar(_Counts):
    """A live bar: the work done and its total, loss, metric, speed, time left, and the number of checkpoints.

    Args:
        stays: whether the bar stays on the screen at the end.
        heading: a line to print once the work begins.
    """

    def __init__(self, stream: Stream | None = None, stays: bool = True, heading: str = ""):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(heading)
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[loss]}"),
            TextColumn("[bold green]{task.fields[metric]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[saved]}"),
            expand=True,
            transient=not stays,
            console=Console(file=cast(IO[str] | None, stream)),
        )
        self.task: Any = None

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def start(self, what: str, total: int, done: int | None = None) -> None:
        super().start(what, total, done)
        self.task = self.bar.add_task(what, total=total, completed=self.done, loss="", metric="", speed="", saved="")

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        self.count(step)
        told: dict[str, Any] = {} if loss is None else {"loss": f"loss {loss:.4f}"}
        speed = f"{self.rate:.1f} steps/s" if self.by_steps else ""
        self.bar.update(self.task, completed=self.done, speed=speed, saved=_checkpoints(saved).strip(), **told)

    def doing(self, what: str) -> None:
        self.bar.update(self.task, speed=what)

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        self.bar.update(self.task, metric=metric, saved=_checkpoints(saved).strip())

    def say(self, line: str) -> None:
        self.bar.console.print(escaped(line), markup=False, highlight=False)


_told: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Passes what `working` says on this thread to `tell`."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


def working(what: str) -> None:
    """Says what is being done just now, to whoever listens on this thread; long work calls it every now and then."""
    if (tell := _told.get()) is not None:
        tell(what)


def _checkpoints(saved: int | None) -> str:
    return "" if saved is None else f"  {saved} checkpoint{'s' if saved != 1 else ''}"


def watching(stream: Stream | None = None, stays: bool = False, heading: str = "") -> Progress:
    """A bar if the stream (by default stderr) is a terminal; lines if it is a file or a pipe."""
    stream = stream or sys.stderr
    return Bar(stream, stays, heading) if stream.isatty() else Lines(stream, heading=heading)
