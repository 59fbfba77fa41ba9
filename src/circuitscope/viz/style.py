"""The look that all figures share (colours, fonts), and how a figure and its numbers are written to files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from circuitscope.errors import UserError, escaped

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
STYLES = ("-", "--", "-.", ":")
GREY = "#595959"
DIVERGING, SEQUENTIAL = "RdBu_r", "viridis"
ENDINGS = (".png", ".svg", ".pdf")
DPI = 150

_LOOK: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, and has Φ, κ and δ
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "figure.titlesize": 9.5,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "pdf.fonttype": 42,  # whole TrueType fonts in the file
    "svg.fonttype": "path",  # glyphs as outlines: the same on every machine
    "svg.hashsalt": "circuitscope",
}


class Sheet(Figure):
    """A matplotlib figure that belongs to no window, shows itself in a notebook, and keeps the numbers it drew.

    Args:
        table: gives the numbers as a tidy table, when they are asked for.
    """

    def __init__(self, *, table: Callable[[], pd.DataFrame], **options: Any):
        super().__init__(**{"dpi": DPI, **options})
        self._table = table

    @property
    def data(self) -> pd.DataFrame:
        """The numbers behind the figure, one row each."""
        return self._table()

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        with look():
            self.savefig(buffer, format="png")
        return buffer.getvalue()


@contextmanager
def look() -> Iterator[None]:
    """Settings under which every figure is drawn and saved; afterwards those of the caller are back."""
    with matplotlib.rc_context(_LOOK):
        yield


def pens(n: int) -> list[tuple[str, str]]:
    """The colour and line style of each of n curves: colours first, and the next style where they run out."""
    return [(COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]) for i in range(n)]


def written(name: str) -> str:
    """A name as matplotlib writes it letter by letter: $ opens no formula, and a first _ hides no legend entry."""
    return (" " if name.startswith("_") else "") + escaped(name).replace("$", r"\$")


def plain(axes: Axes) -> None:
    """Axes with two spines and a faint grid, for curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def check_ending(path: Path | None) -> None:
    """Refuses a file name whose ending is not one of a figure."""
    if path is not None and path.suffix.lower() not in ENDINGS:
        raise UserError(f"cannot write {path}: figures end in {', '.join(ENDINGS)}, not in '{path.suffix}'")


def save(figure: Sheet, path: Path, *, data: bool = False) -> list[Path]:
    """Writes a figure, with `data` also its numbers as CSV beside it; gives the paths. Same figure, same bytes."""
    check_ending(path)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    paths = [path]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with look():
            figure.savefig(path, metadata=undated)
        if data:
            paths.append(path.with_suffix(".csv"))
            figure.data.to_csv(paths[-1], index=False, float_format="%.7g")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return paths
