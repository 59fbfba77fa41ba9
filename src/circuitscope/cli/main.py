"""The `circuitscope` program: gathers the commands and turns errors into one line and an exit code."""

from circuitscope.cli import interrupts

with interrupts.leaving_at_once():
    import atexit
    import errno
    import os
    import sys
    import threading
    import warnings
    from typing import Any, NoReturn

    import typer

    from circuitscope.cli import (
        analyze,
        doctor,
        evaluate,
        models,
        phi,
        plot,
        probe,
        report,
        runs,
        study,
        sweep,
        tasks,
        train,
        usage,
        zoom,
    )
    from circuitscope.cli.streams import kept_streams
    from circuitscope.errors import RunFailed, Stopped, UserError, escaped

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

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
    "Exit codes: 0 done, 1 a run failed or its output could not be written, 2 bad input, 130 stopped by Ctrl-C.",
)
app.command("train")(train.train)
app.command("analyze")(analyze.analyze)
app.command("evaluate")(evaluate.evaluate)
app.command("sweep")(sweep.sweep)
app.add_typer(study.app, name="study")
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
    except KeyboardInterrupt:  # a second one, while the first was being answered
        code = interrupts.CODE
    interrupts.no_more_tracebacks()
    waited_for = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if waited_for or not (code is None or isinstance(code, int)):
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, AttributeError):  # what an exit function printed; None where there is no output
        pass
    os._exit(code or 0)


def main() -> NoReturn:
    """Runs the command line's words and exits with its code."""
    with kept_streams() as streams:
        code = _run()
        error = streams.flush()
        if error is not None and not code:
            code = 1
            if not isinstance(error, BrokenPipeError):
                _print_error(f"cannot write the output: {error.strerror}; apart from that, the command ran to its end")
    sys.exit(code)


def _run() -> int:
    """Runs the command line's words; gives the exit code."""
    debug = "--debug" in sys.argv
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    if empty := usage.empty(args):
        _print_error(f"{empty} is empty; give it a value, or leave it out")
        return 2
    if _ranks() > 1 and args[:1] != ["train"]:
        _print_error("torchrun starts several processes for circuitscope train only; run other commands without it")
        return 2
    wants_help = args in (["--help"], ["-h"])
    warnings.showwarning = _print_warning
    try:
        code = app(args=[] if wants_help else args, prog_name="circuitscope", standalone_mode=False)
        if code == interrupts.CODE:  # so Typer answers Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        message = usage.told(error)
        if message:
            _print_error(message)
        return 0 if wants_help else 2
    except (typer.Abort, KeyboardInterrupt):
        print(interrupts.LINE, file=sys.stderr, flush=True)
        return interrupts.CODE
    except Stopped as stop:
        _print_error(str(stop))
        return stop.exit_code
    except (UserError, RunFailed) as error:
        if debug:
            raise
        _print_error(str(error))
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:
        if debug:
            raise
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """One line on an error that nobody expected: a full disk, too little memory, a bug here or in another package."""
    from circuitscope.memory import on_gpu, out_of_memory_in_words, ran_out  # not needed for help
    from circuitscope.registry import outside_module

    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        _print_error(f"cannot write {error.filename or 'a file'}: {error.strerror}")
    elif ran_out(error):
        _print_error(
            f"out of memory: {out_of_memory_in_words(error)}; use less: fewer --sequences or --examples, and for"
            " training a smaller --batch-size, --length, --d-model or --vocab-size"
            f"{'; or --device cpu' if on_gpu(error) else ''}"
        )
    else:
        module = outside_module(error)
        whose = f"in {module}, which another package brings" if module else "this is a bug"
        _print_error(f"{type(error).__name__}: {error} ({whose}; --debug shows where)")
    return 1


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Prints a warning about a run's files as one line, and any other as Python does."""
    if category.__name__ == "RecordWarning":  # its module need not be loaded for this
        if _ranks() == 1 or os.environ.get("RANK") == "0":
            _print_line(f"warning: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def _ranks() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def _print_error(message: str) -> None:
    """Says why the program ends; ranks end together, and one of them says why."""
    if _ranks() > 1:
        from circuitscope.training.ranks import speaks_first

        if not speaks_first():
            return
    _print_line(message)


def _print_line(message: str) -> None:
    print("circuitscope: " + escaped(" ".join(message.split())), file=sys.stderr, flush=True)
