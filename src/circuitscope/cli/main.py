"""The `circuitscope` program: gathers the commands and turns errors into one line and an exit code."""

import atexit
import os
import sys
import threading
from typing import NoReturn

import typer

from circuitscope.cli import analyze, doctor, models, phi, plot, probe, report, tasks, train, zoom
from circuitscope.errors import RunFailed, UserError

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

    To take apart an interpreter with torch in it takes a second, and nothing comes of it: what is registered for the
    end is run, what is printed is written, and the process is left. A thread that still works is waited for.
    """
    try:
        main()
    except SystemExit as end:
        code = end.code
    waited_for = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if waited_for or not (code is None or isinstance(code, int)):
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        code = code or 1
    os._exit(code or 0)


def main() -> NoReturn:
    """Runs the command line's words and exits with its code."""
    debug = "--debug" in sys.argv
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    wants_help = args in (["--help"], ["-h"])
    try:
        code = app(args=[] if wants_help else args, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        message = error.format_message()
        if message:
            _print_error(message)
        sys.exit(0 if wants_help else 2)
    except typer.Abort:
        sys.exit(130)
    except (UserError, RunFailed) as error:
        if debug:
            raise
        _print_error(str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _print_error(f"{type(error).__name__}: {error} (this is a bug; --debug shows where)")
        sys.exit(1)


def _print_error(message: str) -> None:
    print("circuitscope: " + " ".join(message.split()), file=sys.stderr)
