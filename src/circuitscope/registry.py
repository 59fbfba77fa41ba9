"""Registries of things known by name: those of this package, and those that others add by decorator or entry point.

An installed package adds to a registry through the entry-point group `circuitscope.<plural>`: the entry names a
module (or an object in one), and importing that module registers what it contains. Entry points load when a name is
first looked up.
"""

import importlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from circuitscope.errors import UserError, unknown

Thing = TypeVar("Thing")
_OWN = "circuitscope."
_OUTSIDE: set[str] = set()  # modules of others that registered something


def outside_module(error: BaseException) -> str:
    """The module of another package in which an error arose, directly or below it; or ""."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((module for module in reversed(modules) if module in _OUTSIDE), "")


class Registry(Mapping[str, Thing], Generic[Thing]):
    """A mapping from names to things; an unknown name raises an error that gives the nearest valid name.

    Args:
        kind: the word for one of the things in messages, for example "mixer".
        plural: the last part of the entry-point group: "mixers" for `circuitscope.mixers`.
        own: the modules of this package whose import registers its own things, which are listed first, in this
            order. They load when a name is first looked up, or first added from outside.
    """

    def __init__(self, kind: str, plural: str, own: Sequence[str] = ()):
        self.kind, self.group, self._modules = kind, f"circuitscope.{plural}", tuple(own)
        self._things: dict[str, Thing] = {}
        self._from: dict[str, str] = {}  # the module that registered each name
        self._loaded_own = self._loaded = False

    def add(self, name: str, thing: Thing, module: str) -> None:
        """Registers a thing that `module` defines. Other packages cannot take a name of this package."""
        if not re.fullmatch(r"\w[\w.-]*", name):  # names are parts of the names of files
            raise UserError(f"{module} cannot register the {self.kind} '{name}': a name has letters, digits and _ . -")
        if not module.startswith(_OWN):
            self._load_own()
            _OUTSIDE.add(module)
        before = self._from.get(name)
        if before is not None and before != module:
            whose = "circuitscope's own" if before.startswith(_OWN) else f"registered by {before}"
            raise UserError(f"{module} cannot register the {self.kind} '{name}': that name is {whose}; choose another")
        self._things[name], self._from[name] = thing, module

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that registers a class or function under a name."""

        def remember(thing: Any) -> Any:
            self.add(name, thing, thing.__module__)
            return thing

        return remember

    def own(self) -> list[str]:
        """The names that come with this package."""
        self._load_own()
        return [name for name in self._things if self._from[name].startswith(_OWN)]

    def __getitem__(self, name: object) -> Thing:
        self._load()
        if not isinstance(name, str) or self._spelled(name) not in self._things:
            raise unknown(self.kind, name, self._things)
        return self._things[self._spelled(name)]

    def _spelled(self, name: str) -> str:
        """The name as it was registered, where it was given with - in place of _."""
        return name if name in self._things else name.replace("-", "_")

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._things)

    def __len__(self) -> int:
        self._load()
        return len(self._things)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True  # set first, so that modules may look up names while they load
        try:
            self._load_own()
            for point in entry_points(group=self.group):
                self._load_one(point)
        except BaseException:
            self._loaded = False  # so that the next lookup raises the error again
            raise

    def _load_own(self) -> None:
        if self._loaded_own:
            return
        self._loaded_own = True
        for module in self._modules:
            importlib.import_module(module)
        order = {module: place for place, module in enumerate(self._modules)}
        self._things = dict(sorted(self._things.items(), key=lambda item: order.get(self._from[item[0]], len(order))))

    def _load_one(self, point: EntryPoint) -> None:
        try:
            point.load()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist is not None else point.value
            raise UserError(
                f"the installed package {package}, which provides the {self.kind} '{point.name}', cannot be loaded:"
                f" {type(error).__name__}: {' '.join(str(error).split())}; repair or uninstall it"
            ) from None
