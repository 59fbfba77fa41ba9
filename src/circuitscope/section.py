"""The base of every part of a config: frozen, without unknown keys, and without booleans or infinities for numbers.

A part also says which of its fields have no effect on a run's weights, and which fields were added in later versions.
Beside each field stand its meaning (its description), its unit, and the rule of a default that depends on other fields;
config/fields.py gathers them for `circuitscope train --fields` and docs/config.md.
"""

from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator


class Added(NamedTuple):
    """Marks a field that older config files do not have: `name: Annotated[bool, Added(2, before=False)]`.

    schema: the first version of config.yaml that has the field; a file of an earlier version means `before`
    before: the value under which a run is the same as before the field existed; it does not change the run's digest
    """

    schema: int
    before: Any


class Unit(NamedTuple):
    """Says what a number counts or measures: `steps: Annotated[int, Unit("steps")]`."""

    name: str


class DefaultBy(NamedTuple):
    """Says how a default is found that depends on other fields; the reference of the fields shows it as the default."""

    rule: str


class Section(BaseModel):
    """The base class of the config's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a name, not a boolean")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("expected a number below 2^63")
        return value

    @classmethod
    def added(cls) -> dict[str, Added]:
        """The fields that were added in later versions."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, Added)}

    def without_effect(self) -> frozenset[str]:
        """The names of the fields that, with this part's values, do not change the weights of a run."""
        return frozenset()
