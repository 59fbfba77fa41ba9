"""Explains a call that failed because an argument has another type than annotated, or because memory ran out.

A call that works is left alone: a function may take more than its annotations say. Only if a call raises an error that
is not meant for people, its arguments are compared with the annotations; the one line names the argument.
"""

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_type_hints

from circuitscope.errors import RunFailed, Stopped, UserError, described

Function = TypeVar("Function", bound=Callable[..., Any])


def explained(function: Function) -> Function:
    """The same function; an error that comes from an argument of another type is a UserError that says so.

    One that says that there was not enough memory is a RunFailed.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
        except (UserError, RunFailed, Stopped):
            raise
        except Exception as error:
            _explain(function, args, kwargs, error)
            raise
        return _watched(found, function, args, kwargs) if inspect.isgenerator(found) else found

    return call  # type: ignore[return-value]


def _watched(found: Iterator[Any], function: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The items of a generator, which computes only while somebody iterates over it."""
    try:
        yield from found
    except (UserError, RunFailed, Stopped):
        raise
    except Exception as error:
        _explain(function, args, kwargs, error)
        raise


def _explain(function: Any, args: Any, kwargs: Any, error: Exception) -> None:
    """Raises a UserError if an argument has another type than annotated, or a RunFailed if memory ran out."""
    from circuitscope.memory import on_gpu, out_of_memory_in_words, ran_out  # which imports torch

    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # Python's own words fit a wrong number of arguments
        return
    hints = get_type_hints(function, localns=_Names(vars(builtins) | function.__globals__))
    for name, value in given.items():
        hint = hints.get(name, Any)
        if _is_variadic(function, name) or _fits(value, hint):
            continue
        raise UserError(f"{function.__name__}: {name} must be {_in_words(hint)}, got {described(value)}") from error
    if ran_out(error):
        why = out_of_memory_in_words(error)
        less = "use fewer or shorter sequences" + (", or read on the CPU" if on_gpu(error) else "")
        raise RunFailed(f"{function.__name__}: out of memory; {less} ({why})") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type. Of a list or a mapping, beartype looks at one item, so each item is tried alone."""
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    parts: list[Any] = [value]
    if isinstance(value, list):
        parts += [[item] for item in value]
    elif isinstance(value, dict):
        parts += [{key: item} for key, item in value.items()]
    conf = BeartypeConf(is_pep484_tower=True)  # an int will do where a float is asked for
    return all(is_bearable(part, hint, conf=conf) for part in parts)


class _Names(dict[str, Any]):
    """Names in annotations; one that is imported for type checkers alone stands for anything."""

    def __missing__(self, name: str) -> Any:
        return Any


def _is_variadic(function: Any, name: str) -> bool:
    kind = inspect.signature(function).parameters[name].kind
    return kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _in_words(hint: Any) -> str:
    """A type as it stands in the code, without the modules: `Run | str | Path`."""
    text = re.sub(r"<class '(.*?)'>", r"\1", hint.__name__ if isinstance(hint, type) else str(hint))
    return re.sub(r"[\w.]+\.(?=\w)", "", text).replace("NoneType", "None")
