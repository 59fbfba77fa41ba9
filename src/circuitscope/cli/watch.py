"""What a person sees while checkpoints are analyzed: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any


class Bar:
    """A live bar on stderr's terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.task: Any = None

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def start(self, what: str, total: int) -> None:
        self.task = self.bar.add_task(what, total=total)

    def advance(self, step: int) -> None:
        self.bar.advance(self.task)

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)


class Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self.what, self.total, self.done, self.told = "", 0, 0, time.monotonic()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.told = what, total, 0, time.monotonic()

    def advance(self, step: int) -> None:
        self.done += 1
        if time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self.say(f"{self.what}: step {step}, {self.done} of {self.total} checkpoints")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def watching() -> Bar | Lines:
    """A bar for a terminal, lines for a file or a pipe."""
    return Bar() if sys.stderr.isatty() else Lines()
