"""The look that all tables have in the terminal."""

from collections.abc import Iterable, Sequence

_WIDTH = 160  # used where the output is not a terminal


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a plain table, wrapped to the width of the terminal, or to 160 columns in a file or a pipe.

    A column that is blank in every row is left out; a table without rows prints nothing.
    """
    import sys

    from rich.console import Console
    from rich.table import Table

    from circuitscope.errors import escaped

    table = Table(box=None, pad_edge=False, header_style="bold")
    listed = list(rows)
    if not listed:
        return
    shown = [i for i in range(len(columns)) if any(row[i] for row in listed)]
    for i in shown:
        table.add_column(escaped(columns[i]))
    for row in listed:
        table.add_row(*(escaped(row[i]) for i in shown))
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)
