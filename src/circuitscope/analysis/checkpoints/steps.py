"""Chooses checkpoints by what a user asks for: "all", "0:2000:100", "0,400,800"."""

from collections.abc import Iterable, Sequence

from circuitscope.errors import UserError, shown

ChosenSteps = str | int | Iterable[int] | None


def choose_steps(asked: ChosenSteps, saved: Sequence[int]) -> list[int]:
    """The saved steps that are asked for.

    A range FIRST:LAST:EVERY takes the saved steps FIRST, FIRST + EVERY, … up to LAST; without EVERY it takes all saved
    steps from FIRST to LAST. A single number must be a saved step.
    """
    if asked is None or asked == "all":
        return list(saved)
    if isinstance(asked, str):
        parts = [part.strip() for part in asked.split(",")]
        chosen = [s for part in parts for s in (_range(part, saved) if ":" in part else [_saved(part, saved)])]
    else:
        chosen = [_saved(s, saved) for s in ([asked] if isinstance(asked, int) else asked)]
    if not chosen:
        raise UserError(f"no steps are asked for; {_have(saved)}")
    return sorted(set(chosen))


def _range(text: str, saved: Sequence[int]) -> list[int]:
    fields = text.split(":")
    if len(fields) > 3 or not all(f == "" or _is_number(f) for f in fields):
        raise _malformed(text)
    first = int(fields[0] or 0)
    last = int(fields[1]) if fields[1] else max(saved)
    every = int(fields[2]) if len(fields) == 3 and fields[2] else 1
    if every == 0:
        raise _malformed(text)
    found = [s for s in saved if first <= s <= last and (s - first) % every == 0]
    if not found:
        raise UserError(f"no checkpoint in {text}; {_have(saved)}")
    return found


def _saved(step: object, saved: Sequence[int]) -> int:
    text = str(step)
    if not _is_number(text):
        raise _malformed(text)
    if int(text) not in saved:
        nearest = min(saved, key=lambda s: abs(s - int(text)))
        raise UserError(f"no checkpoint at step {text}; nearest: {nearest} ({_have(saved)})")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


def _have(saved: Sequence[int]) -> str:
    return f"{len(saved)} saved, from {saved[0]} to {saved[-1]}"


def _malformed(text: str) -> UserError:
    return UserError(f"steps are all, numbers such as 0,400,800, or a range such as 0:2000:100, got {shown(text)}")
