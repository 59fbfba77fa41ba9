"""What a person sees while jobs run: a live table of trials on a terminal, one line per trial elsewhere."""

import time
from collections.abc import Mapping
from typing import Any

from circuitscope.errors import escaped
from circuitscope.sweeps.executor import Moved


class TrialLines:
    """One line when a trial starts and one when it ends.

    Args:
        labels: what each trial, or each run that is analyzed, is called.
        done: how many were done before.
        stream: where the lines go.
    """

    def __init__(self, labels: Mapping[str, str], done: int, stream: Any):
        self.labels, self.done = {digest: escaped(label) for digest, label in labels.items()}, done
        self.stream = stream

    def __enter__(self) -> "TrialLines":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def started(self, digest: str) -> None:
        self.show(f"started {digest} {self.labels[digest]}")

    def moved(self, news: Moved) -> None:
        pass

    def ended(self, digest: str, outcome: str) -> None:
        self.done += 1
        self.show(f"{self.done}/{len(self.labels)} {self.labels[digest]}: {outcome}")

    def show(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class TrialTable(TrialLines):
    """The trials that run now as a live table; those that ended scroll by above it."""

    def __init__(self, labels: Mapping[str, str], done: int, stream: Any):
        from rich.console import Console
        from rich.live import Live

        super().__init__(labels, done, stream)
        self.now: dict[str, Moved | None] = {}
        self.began: dict[str, tuple[float, int]] = {}
        self.console = Console(file=stream, markup=False, highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "TrialTable":
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def started(self, digest: str) -> None:
        self.now[digest] = None
        self._draw()

    def moved(self, news: Moved) -> None:
        self.began.setdefault(news.digest, (time.monotonic(), news.step))
        self.now[news.digest] = news
        self._draw()

    def ended(self, digest: str, outcome: str) -> None:
        self.now.pop(digest, None)
        super().ended(digest, outcome)
        self._draw()

    def show(self, line: str) -> None:
        self.console.print(line)

    def _draw(self) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("trial", "step", "loss", "validation", "left"):
            table.add_column(column)
        for digest, news in self.now.items():
            table.add_row(self.labels[digest], *(self._cells(news) if news else ("starting", "", "", "")))
        self.live.update(table)

    def _cells(self, news: Moved) -> tuple[str, str, str, str]:
        began, first = self.began[news.digest]
        rate = (news.step - first) / max(time.monotonic() - began, 1e-9)
        left = f"{(news.steps - news.step) / rate:.0f} s" if rate > 0 else ""
        loss = "" if news.loss is None else f"{news.loss:.4f}"
        return f"{news.step}/{news.steps}", loss, news.metric, left


def watching_trials(labels: Mapping[str, str], done: int, stream: Any) -> TrialLines:
    """A live table if the output is a terminal, lines otherwise."""
    return TrialTable(labels, done, stream) if stream.isatty() else TrialLines(labels, done, stream)
