"""Runs an input and judges what came of it.

Good: it worked; or it was refused in one line with exit code 1 or 2, from Python with a UserError or RunFailed. All
else is a finding: a traceback, "this is a bug", an unexplained exception of another library, a warning of Python's, raw
control characters in a message, or no end within the time limit. A finding belongs to a group, named by the exception
and by the deepest function of the package that it passed through.
"""

import contextlib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ground import Capped

SECONDS = 60.0  # of processor time for one input, which is much for the small inputs
_WAITING = 4  # how many times as long it may take by the clock, beside other work
_LONGEST = 3000  # characters of a message
_FOREIGN = re.compile(
    r"validation error for|pydantic|mat1 and mat2|size mismatch|must match the size of tensor"
    r"|index out of range in self|enforce fail|DefaultCPUAllocator"
    r"|Expected all tensors|expected scalar type|not implemented for '|aten::|c10::"
    r"|object has no attribute|not supported between instances|object is not (iterable|subscriptable|callable)"
)
_WARNING = re.compile(r"^.*:\d+: \w*Warning: .*$", re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


class TooLong(BaseException):
    """The time limit of an input is over."""


@dataclass(frozen=True)
class Finding:
    """Something that should not be. `group` is the same for inputs that fail in the same way at the same place."""

    group: str
    detail: str


Outcome = str | Finding
"""A word for a good outcome (done, refused, capped), or what is wrong."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooLong in the main thread after so much processor time, or when it waits for much longer."""

    def ring(signum: int, frame: Any) -> None:
        raise TooLong

    clocks = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, _WAITING * seconds)}
    before = {signum: signal.signal(signum, ring) for signum, _ in clocks.values()}
    for clock, (_, limit) in clocks.items():
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


_DECORATES = re.compile("/tests/|/arguments.py$|/reading/gradients.py$")  # files that only pass a call on


def place(error: BaseException) -> str:
    """The deepest function of the package that an exception passed through, as `runs/run.py:load`."""
    found = "outside"
    for frame in traceback.extract_tb(error.__traceback__):
        if "/circuitscope/" in frame.filename and "/tests/" not in frame.filename:
            found = f"{frame.filename.rpartition('/circuitscope/')[2]}:{frame.name}"
    return found


def of_exception(kind: str, error: BaseException) -> Outcome:
    """Judges an exception that reached the caller of a Python function."""
    from circuitscope.errors import RunFailed, UserError

    if isinstance(error, Capped):
        return "capped"
    name = type(error).__name__
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError | RunFailed):
        return _of_message(kind, str(error), name, place(error)) or "refused"
    if isinstance(error, TypeError) and not any(
        "/circuitscope/" in frame.filename
        and not re.search("/tests/|/arguments.py$|/reading/gradients.py$", frame.filename)
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        return "refused"  # by Python itself: a wrong number or name of arguments, seen through our decorators
    return Finding(f"{kind}: {name} in {place(error)}", text[-_LONGEST:])


def _of_message(kind: str, message: str, name: str, where: str, quoted: int = 10_000) -> Finding | None:
    if not message.strip():
        return Finding(f"{kind}: empty message of {name} in {where}", repr(message))
    if found := _FOREIGN.search(message):
        return Finding(f"{kind}: words of another library ({found[0]}) in {where}", message[:_LONGEST])
    if len(message) > _LONGEST + quoted:
        return Finding(f"{kind}: very long message in {where}", message[:500])
    if kind == "command" and _CONTROL.search(message):
        return Finding(f"{kind}: control characters in a message in {where}", repr(message[:_LONGEST]))
    return None


def call(function: Callable[[], Any], kind: str = "call") -> Outcome:
    """Calls a Python function and judges what it raises."""
    try:
        with time_limit(SECONDS), _output():
            function()
        return "done"
    except BaseException as error:
        return of_exception(kind, error)


class _Heard:
    """Standard output and error in files of their own, with the encodings that they have in a shell."""

    out, err = "", ""

    def __init__(self) -> None:
        self.stdout = tempfile.TemporaryFile("w+", encoding="utf-8", newline="")  # noqa: SIM115
        self.stderr = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="backslashreplace", newline=""
        )

    def close(self) -> tuple[str, str]:
        """What was printed to both."""
        texts = []
        for stream in (self.stdout, self.stderr):
            stream.flush()
            stream.buffer.seek(0)
            texts.append(stream.buffer.read().decode(errors="replace"))
            stream.close()
        return texts[0], texts[1]


@contextlib.contextmanager
def _output() -> Iterator[_Heard]:
    heard = _Heard()
    try:
        with contextlib.redirect_stdout(heard.stdout), contextlib.redirect_stderr(heard.stderr):
            yield heard
    finally:
        heard.out, heard.err = heard.close()


def command(words: Sequence[str]) -> Outcome:
    """Runs a command line in this process and judges its exit code and what it prints."""
    from circuitscope.cli import main as program

    raised: list[BaseException] = []
    app = program.app

    def listening(*args: Any, **kwargs: Any) -> Any:
        try:
            return app(*args, **kwargs)
        except BaseException as error:
            raised.append(error)
            raise

    program.app = listening  # type: ignore[assignment]
    before, sys.argv = sys.argv, ["circuitscope", *words]
    code: Any = None
    try:
        with time_limit(SECONDS), _output() as heard:
            try:
                program.main()
            except SystemExit as end:
                code = end.code
    except Capped:
        return "capped"
    except BaseException as error:
        return Finding(
            f"command: {type(error).__name__} in {place(error)}", "".join(traceback.format_exception(error))[-_LONGEST:]
        )
    finally:
        program.app, sys.argv = app, before
    where = f"{type(raised[-1]).__name__} in {place(raised[-1])}" if raised else "no exception"
    trace = "".join(traceback.format_exception(raised[-1]))[-_LONGEST:] if raised else ""
    return of_printed(code or 0, heard.out, heard.err, where, trace, _quoted(words))


def _quoted(words: Sequence[str]) -> int:
    """How many characters a message may have more because it quotes what was given."""
    return 2 * max((len(word) for word in words), default=0)


def of_printed(code: Any, out: str, err: str, where: str = "a process", trace: str = "", quoted: int = 0) -> Outcome:
    """Judges what a command printed and its exit code."""
    detail = trace or f"exit code {code}\n{err[-_LONGEST:]}"
    if "this is a bug" in err or "Traceback (most recent call last)" in out + err:
        return Finding(f"command: {where}", detail)
    if code not in (0, 1, 2, 130, 143):
        return Finding(f"command: exit code {code}, {where}", detail)
    if found := _WARNING.search(err):
        warning = re.sub(r"^.*/(?:circuitscope|site-packages)/|(?<=py):\d+", "", found[0])
        return Finding(f"command: warning of Python: {warning[:90]}", err[-_LONGEST:])
    if code == 0:
        return "done"
    if code == 2 and not err and "Usage: " in out:
        return "refused"  # with the help
    said = [line for line in err.splitlines() if re.match("circuitscope: (?!warning: )", line)]
    if len(said) != 1 or not err.rstrip("\n").endswith(said[0]):
        return Finding(f"command: {len(said)} lines of error with exit code {code}, {where}", detail)
    return (
        _of_message(
            "command", said[0].removeprefix("circuitscope: "), "the error", where.partition(" in ")[2] or where, quoted
        )
        or "refused"
    )


def process(program: Sequence[str], words: Sequence[str], cwd: os.PathLike[str], env: dict[str, str]) -> Outcome:
    """Runs a command line as a process of its own and judges it."""
    import subprocess

    try:
        done = subprocess.run(
            [*program, *words],
            cwd=cwd,
            env=env,
            capture_output=True,
            timeout=4 * SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Finding("process: no end", f"after {4 * SECONDS:.0f} s")
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if "fuzz: capped" in err:
        return "capped"
    return of_printed(done.returncode, out, err, quoted=_quoted(words))
