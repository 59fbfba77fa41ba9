"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Protocol

from circuitscope.runs.run import Run


class Progress(Protocol):
    """Told about a run as it goes."""

    def __enter__(self) -> "Progress": ...
    def __exit__(self, *error: Any) -> None: ...
    def start(self, run: Run, steps: int, first: int) -> None: ...
    def step(self, step: int, loss: float, saved: int) -> None: ...
    def evaluated(self, step: int, loss: float, accuracy: float, saved: int) -> None: ...
    def say(self, line: str) -> None: ...


class Silent:
    """Says nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def start(self, run: Run, steps: int, first: int) -> None:
        pass

    def step(self, step: int, loss: float, saved: int) -> None:
        pass

    def evaluated(self, step: int, loss: float, accuracy: float, saved: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass


class Lines(Silent):
    """A line at each evaluation."""

    def __init__(self) -> None:
        self.began, self.first, self.steps = time.monotonic(), 0, 0

    def start(self, run: Run, steps: int, first: int) -> None:
        self.began, self.first, self.steps = time.monotonic(), first, steps

    def evaluated(self, step: int, loss: float, accuracy: float, saved: int) -> None:
        elapsed = time.monotonic() - self.began
        rate = (step - self.first) / elapsed if elapsed > 0 else 0.0
        left = (self.steps - step) / rate if rate else 0.0
        print(
            f"step {step:>6}/{self.steps}  validation loss {loss:7.4f}  accuracy {accuracy:6.1%}"
            f"  {rate:5.1f} steps/s  {left:4.0f} s left  {saved} checkpoints",
            flush=True,
        )

    def say(self, line: str) -> None:
        print(line, flush=True)


class Bar(Silent):
    """A live bar: step, loss, validation accuracy, steps/s, time left, checkpoints written."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("[bold green]accuracy {task.fields[accuracy]}"),
            TextColumn("{task.fields[rate]:.1f} steps/s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[saved]} checkpoints"),
            expand=True,
        )
        self.began, self.first = time.monotonic(), 0

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, run: Run, steps: int, first: int) -> None:
        self.began, self.first = time.monotonic(), first
        self.task = self.bar.add_task(
            run.name, total=steps, completed=first, loss=float("nan"), accuracy="   – ", rate=0.0, saved=0
        )

    def step(self, step: int, loss: float, saved: int) -> None:
        rate = (step - self.first) / max(time.monotonic() - self.began, 1e-9)
        self.bar.update(self.task, completed=step, loss=loss, rate=rate, saved=saved)

    def evaluated(self, step: int, loss: float, accuracy: float, saved: int) -> None:
        self.bar.update(self.task, accuracy=f"{accuracy:6.1%}", saved=saved)

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)


def progress_for(interactive: bool) -> Progress:
    """A bar for a terminal, lines for a file or a pipe."""
    return Bar() if interactive else Lines()
