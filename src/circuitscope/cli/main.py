"""The `circuitscope` program: gathers the commands and turns errors into one line and an exit code."""

import atexit
import errno
import os
import sys
import threading
import warnings
from typing import Any, NoReturn

import typer

from circuitscope.cli import analyze, doctor, models, phi, plot, probe, report, runs, sweep, tasks, train, usage, zoom
from circuitscope.errors import RunFailed, UserError, escaped

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="circuitscope",
    no_args_is_help=True,
    add_completion=False,
    add_help_option=False,  # `main` answers it: with the option, Typer loads pydantic before any command's own help
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train sequence models on recall tasks, save every stage, and read circuits out of it.",
    epilog="Start with: [bold]circuitscope train --save-every 100[/bold]. "
    "COMMAND --help explains a command; --debug shows the traceback of an error. "
    "Exit codes: 0 done, 1 a run failed, 2 bad input.",
)
app.command("train")(train.train)
app.command("analyze")(analyze.analyze)
app.command("sweep")(sweep.sweep)
app.command("runs")(runs.runs)
app.command("zoom")(zoom.zoom)
app.command("phi")(phi.phi)
app.command("probe")(probe.probe)
app.command("report")(report.report)
app.add_typer(models.app, name="models")
app.add_typer(tasks.app, name="tasks")
app.add_typer(plot.app, name="plot")
app.command("doctor")(doctor.doctor)


def command() -> NoReturn:
    """Entry point of the `circuitscope` command: `main`, then out at once.

    Taking down an interpreter that has loaded torch takes a second and is of no use. So exit functions are run, the
    output is written, and the process ends. A thread that is still working is waited for.
    """
    try:
        main()
    except SystemExit as end:
        code = end.code
    waited_for = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if waited_for or not (code is None or isinstance(code, int)):
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(_written(code or 0))


def main() -> NoReturn:
    """Runs the command line's words and exits with its code."""
    sys.exit(_written(_run()))


def _run() -> int:
    """Runs the command line's words; gives the exit code."""
    debug = "--debug" in sys.argv
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    if empty := usage.empty(args):
        _print_error(f"{empty} is empty; give it a value, or leave it out")
        return 2
    wants_help = args in (["--help"], ["-h"])
    warnings.showwarning = _print_warning
    try:
        code = app(args=[] if wants_help else args, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        message = usage.told(error)
        if message:
            _print_error(message)
        return 0 if wants_help else 2
    except typer.Abort:
        return 130
    except (UserError, RunFailed) as error:
        if debug:
            raise
        _print_error(str(error))
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return _cannot_write(error)
        if debug:
            raise
        if isinstance(error, MemoryError):
            _print_error(f"out of memory: {error}; ask for less, for example with fewer --sequences")
            return 1
        from circuitscope.registry import outside_module  # not needed for help

        module = outside_module(error)
        whose = f"in {module}, which another package brings" if module else "this is a bug"
        _print_error(f"{type(error).__name__}: {error} ({whose}; --debug shows where)")
        return 1


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Prints a warning about a run's files as one line, and any other as Python does."""
    if category.__name__ == "RecordWarning":  # its module need not be loaded for this
        _print_error(f"warning: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def _written(code: int) -> int:
    """The exit code once all that was printed is written: 1, after one line, where that is impossible."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return code or _cannot_write(error)
    return code


def _cannot_write(error: OSError) -> int:
    """One line on output that cannot be written, none where its reader has gone; what is left of it is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        _print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}")
    return 1


def _print_error(message: str) -> None:
    try:
        print("circuitscope: " + escaped(" ".join(message.split())), file=sys.stderr, flush=True)
    except OSError:  # then the exit code says it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
