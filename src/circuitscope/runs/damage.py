"""What is wrong with files of a run: errors that name the file, and warnings where work goes on without it."""

import stat
import threading
import warnings
from pathlib import Path


class DamagedFile(Exception):
    """A file that is not as it was written: truncated, altered, or not from this package."""


class OtherRun(DamagedFile):
    """A file that is whole and belongs to another run."""


class RecordWarning(UserWarning):
    """Something in a run's folder is damaged or missing, and work goes on without it."""


_said: set[str] = set()
_saying = threading.Lock()


def warn_once(message: str) -> None:
    """Gives a RecordWarning, but only the first time that this process says it."""
    with _saying:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, RecordWarning, stacklevel=3)


def check_regular(path: Path) -> None:
    """Refuses what is no regular file. Reading a pipe, for example, would wait forever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        what = "is a link that leads nowhere" if path.is_symlink() else "is missing"
        raise DamagedFile(f"{path} {what}") from None
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise DamagedFile(f"{path} is not a regular file")
