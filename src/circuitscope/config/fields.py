"""The reference of a config's fields: type, default, unit and meaning of each, read from where the field is declared.

`circuitscope train --fields` prints it, with the tasks and mixers of other installed packages.
`python -m circuitscope.config.fields` prints what this package brings as Markdown: the page docs/config.md.
"""

import difflib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from circuitscope import mixers, tasks
from circuitscope.config.recipes import FAMILIES, RECIPES, Recipe, Rule
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError, shown
from circuitscope.models.config import ModelConfig
from circuitscope.section import DefaultBy, Section, Unit

_WORDS: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "none"}
_WIDTH = 112  # of a line of the page
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class Field(NamedTuple):
    """A field of a section in words; of a recipe, the field and the value alone."""

    field: str
    type: str
    default: str
    unit: str
    meaning: str

    def in_words(self) -> str:
        """The meaning, and below it the rest: `number from 0 to 1; unit: share of the steps; default: 0.1`."""
        if not self.type:
            return self.default
        rest = [self.type, *([f"unit: {self.unit}"] if self.unit else []), f"default: {self.default}"]
        return "\n".join(filter(None, [self.meaning, "; ".join(rest)]))


class Part(NamedTuple):
    """A section of a config, such as train, task.mqar or mixer.mamba; or a recipe, such as recipe.paper.

    name: the word that `find` knows it by
    usage: how its fields are set on the command line
    about: what it is
    """

    name: str
    usage: str
    about: str
    fields: tuple[Field, ...]


def parts(own: bool = False) -> list[Part]:
    """Every section that a config can have; with `own`, only those that this package brings."""
    task_names, mixer_names = (sorted(known.own() if own else known) for known in (tasks.TASKS, mixers.MIXERS))
    return [
        _part("model", ModelConfig, "--set model.FIELD=VALUE"),
        *(_part(f"task.{name}", tasks.TASKS[name], f"--task {name} --set task.FIELD=VALUE") for name in task_names),
        _part("train", TrainConfig, "--set train.FIELD=VALUE"),
        *(
            _part(f"mixer.{name}", mixers.config_class(name), f"--mixers {name} --set 'model.mixers.*.FIELD=VALUE'")
            for name in mixer_names
        ),
    ]


def recipe_parts() -> list[Part]:
    """Every recipe as a section of its own: its fields with their values."""
    return [_recipe(name, recipe) for name, recipe in RECIPES.items()]


def find(word: str) -> list[Part]:
    """The sections and fields that a word stands for.

    `task`, `task.mqar` and `mamba` stand for sections; `warmup`, `task.length` and `task.mqar.filler` stand for fields;
    `recipe` and `recipe.mamba` stand for recipes.
    Any other word stands for the fields with that word in their name or meaning.
    """
    word = re.sub(r"^model\.mixers(\.(\*|\d+))?(?=\.|$)", "mixer", word.lower())
    section, _, name = word.rpartition(".")
    listed = parts()
    found = (
        [part for part in listed if word in (part.name, *part.name.split("."))]
        or [part for part in recipe_parts() if word in (part.name, *part.name.split("."))]
        or _only(listed, lambda part, row: row.field == name and section in ("", part.name, part.name.split(".")[0]))
        or _only(listed, lambda part, row: word in f"{row.field} {row.meaning}".lower())
    )
    if found:
        return found
    names = {part.name for part in (*listed, *recipe_parts())}
    fields = {name for part in listed for row in part.fields for name in (row.field, f"{part.name}.{row.field}")}
    close = difflib.get_close_matches(word, names | fields, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UserError(f"no field for {shown(word)}; {hint}sections: {', '.join(sorted(names))}")


def markdown(listed: Iterable[Part]) -> str:
    """The reference as a page of Markdown."""
    lines = [
        "# Every field of a config",
        "",
        "`make reference` makes this page from the code. `circuitscope train --fields` prints the same on a terminal,",
        "together with the tasks and mixers of other installed packages; `--fields task.mqar` prints one section, and",
        "`--fields warmup` one field. You set a field with `--set`, or in a YAML file that `circuitscope train FILE`",
        "reads. The most used have a flag of their own (`circuitscope train --help`). `circuitscope train --dry-run`",
        "prints a complete file. In YAML, none is written `null`.",
        "",
        *textwrap.wrap(
            "What is not given comes from the recipe of the model, then from the default here. The recipes stand at the"
            " end of this page (`--fields recipe`): each is a list of fields with their values. `--recipe NAME`, or"
            " `recipe: NAME` at the top of a file, takes another recipe, and `plain` takes the defaults alone. The"
            f" first mixer of a model decides whose recipe it takes: {_families()}; a mixer of another package takes"
            " that of attention.",
            _WIDTH,
        ),
    ]
    for part in listed:
        lines += ["", f"## {part.name}", "", part.about, "", f"    circuitscope train {part.usage}", ""]
        if part.name.startswith("recipe."):
            lines += [_row(("field", "value")), _row(("---", "---"))]
            lines += [_row((f"`{row.field}`", row.default)) for row in part.fields]
        elif part.fields:
            lines += [_row(Field._fields), _row("---" for _ in Field._fields)]
            lines += [_row((f"`{field}`", *rest)) for field, *rest in part.fields]
        else:
            lines += ["It has no options."]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _only(listed: list[Part], wanted: Callable[[Part, Field], bool]) -> list[Part]:
    """The sections with the wanted fields alone; a section without any is left out."""
    fewer = [part._replace(fields=tuple(row for row in part.fields if wanted(part, row))) for part in listed]
    return [part for part in fewer if part.fields]


def _families() -> str:
    """`h3 and s4 that of hyena, …`, for the mixers without a recipe of their own."""
    followers: dict[str, list[str]] = {}
    for mixer, recipe in FAMILIES.items():
        if mixer != recipe:
            followers.setdefault(recipe, []).append(mixer)
    return ", ".join(f"{_listed(several, 'and')} that of {recipe}" for recipe, several in followers.items())


def _recipe(name: str, recipe: Recipe) -> Part:
    rows = (
        Field(path, "", value.words if isinstance(value, Rule) else _value(value), "", "")
        for path, value in recipe.fields.items()
    )
    return Part(f"recipe.{name}", f"--recipe {name}", recipe.about, tuple(rows))


def _part(name: str, section: type[Section], usage: str) -> Part:
    by_recipe = {path for family in FAMILIES.values() for path in RECIPES[family].fields}
    fields = []
    for key, info in section.model_fields.items():
        if key != "name":
            row = _field(key, info)
            often = f"{name.partition('.')[0]}.{key}" in by_recipe
            fields.append(row._replace(default=f"{row.default}, or the recipe's") if often else row)
    return Part(name, usage, inspect.cleandoc(section.__doc__ or ""), tuple(fields))


def _field(name: str, info: FieldInfo) -> Field:
    unit, rule = (next((mark[0] for mark in info.metadata if isinstance(mark, kind)), "") for kind in (Unit, DefaultBy))
    return Field(name, _type(info.annotation, _limits(info)), rule or _default(info), unit, info.description or "")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "must be given"
    return "made anew" if info.default_factory is not None else _value(info.default)


def _type(annotation: Any, limits: str = "") -> str:
    """A type in words, with the limits of numbers: `integer ≥ 1 or none`, `constant, linear or cosine`."""
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _type(inner[0], limits)
    if kind is Literal:
        return _any_of(_value(value) for value in inner)
    if kind in (Union, UnionType):
        return _any_of(_type(one, limits) for one in inner)
    if kind in (tuple, list):
        return f"list of {_type(inner[0])}s"
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return "mapping"
    word = str(_WORDS.get(annotation) or getattr(annotation, "__name__", annotation))
    return f"{word} {limits}" if limits and annotation in (int, float) else word


def _limits(info: FieldInfo) -> str:
    """The limits of a number: `from 1 to 1024`, `≥ 1 and < 10^8`."""
    found = {
        key: getattr(mark, key) for mark in info.metadata for key in (*_SIGNS, "multiple_of") if hasattr(mark, key)
    }
    said = [f"a multiple of {step}"] if (step := found.pop("multiple_of", None)) is not None else []
    if found.keys() == {"ge", "le"}:
        return " and ".join([f"from {_value(found['ge'])} to {_value(found['le'])}", *said])
    return " and ".join([*(f"{_SIGNS[key]} {_value(limit)}" for key, limit in found.items()), *said])


def _value(value: Any) -> str:
    """A value as one would write it, with large round numbers as powers."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and value >= 2**16:
        for base in (2, 10):
            power = round(math.log(value, base))
            if base**power == value:
                return f"{base}^{power}"
    if isinstance(value, tuple | list):
        return ", ".join(map(_value, value))
    return str(value) or '""'


def _any_of(words: Iterable[str]) -> str:
    return _listed(words, "or")


def _listed(words: Iterable[str], before_last: str) -> str:
    *most, last = words
    return f"{', '.join(most)} {before_last} {last}" if most else last


if __name__ == "__main__":
    print(markdown([*parts(own=True), *recipe_parts()]), end="")
