"""What an input is: parts that can be left out one by one, and what is done with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import Outcome


@dataclass(frozen=True)
class Input:
    """One input of the walk.

    parts: what it is made of; `act` also takes fewer of them, which is how a failing input is made smaller
    act: does it in the working folder and judges it
    shown: writes parts as a person would
    words: gives the words of a command line after the files around it are made, if the input is one
    """

    kind: str
    parts: Sequence[Any]
    act: Callable[[Sequence[Any], Path], Outcome]
    shown: Callable[[Sequence[Any]], str]
    words: Callable[[Sequence[Any], Path], Sequence[str]] | None = None
